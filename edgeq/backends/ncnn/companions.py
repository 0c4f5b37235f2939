"""Write the files that a C++ or Android application with ncnn needs: the model's two files, a header with the options
and the preprocessing, a self-test, and programs that load the model.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.engines.ncnn_file import PARAM, WEIGHTS, NcnnFile, read_ncnn

from edgeq.backends.base import Artifact
from edgeq.backends.litert.tasks import find_normalization
from edgeq.data.samples import Samples
from edgeq.errors import ModelError
from edgeq.measure.inference import infer
from edgeq.run.session import EngineFiles, Engines
from edgeq.util.records import plain

FOLDER = "ncnn"
SELFTEST, HEADER = "selftest.bin", "model.h"
TOLERANCE = 1e-4
"""Largest difference of a value from its expected answer, as a share of the output's largest value. Kernels differ in
the last bits of functions such as exp.
"""
_TEXTS = Path(__file__).parent / "application_files"
_COPIED = ("main.cpp", "android.cpp")


def with_application_files(artifact: Artifact, samples: Samples, folder: Path, *, count: int) -> Artifact:
    """Return `artifact` with the files that an application needs.

    Args:
        samples: samples whose preprocessing the header states.
        folder: private folder for the files; it does not exist yet.
        count: number of `samples` that become the self-test.
    """
    assert artifact.engine is not None
    # The folder must be new, because every file in it becomes part of the bundle.
    folder.mkdir()
    converted = EngineFiles(folder).convert_once(artifact.model, artifact.engine.engine)
    file = read_ncnn(converted.read_bytes(), str(converted))
    converted.unlink()
    cases = write_cases(artifact, file, samples, count)
    contents = {
        PARAM: file.param,
        WEIGHTS: file.weights,
        SELFTEST: b"".join(cases),
        HEADER: make_header(file.signature, _normalization(file, samples), len(cases)).encode(),
        "README.md": _readme(artifact, file, samples, len(cases)).encode(),
        **{name: (_TEXTS / name).read_bytes() for name in _COPIED},
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return replace(artifact, files={**artifact.files, **{f"{FOLDER}/{name}": folder / name for name in contents}})


def write_cases(artifact: Artifact, file: NcnnFile, samples: Samples, count: int) -> list[bytes]:
    """Return, for each case of the self-test, its inputs and the expected outputs as float32, in the order in which the
    file lists them. The expected outputs are those of the artifact's simulation.
    """
    with Engines() as engines:
        session = engines.open(artifact.proof_model, artifact.proof_settings())
        cases = []
        for sample in itertools.islice(samples, count):
            arrays = {**sample.inputs, **infer(session, sample)}
            ports = (*file.signature["inputs"], *file.signature["outputs"])
            cases.append(b"".join(np.ascontiguousarray(arrays[port["name"]], "<f4").tobytes() for port in ports))
    return cases


def make_header(
    signature: Mapping[str, Any], normalization: tuple[Sequence[float], Sequence[float]] | None, cases: int
) -> str:
    """Return model.h.

    Args:
        signature: the description of inputs, outputs and options in a .ncnn file.
        normalization: mean and factor of each channel of an image; None if the preprocessing is another.
        cases: number of cases in the self-test.
    """
    options = "".join(f"  options.{name} = {str(value).lower()};\n" for name, value in signature["options"].items())
    inputs, outputs = (", ".join(map(_port, signature[key])) for key in ("inputs", "outputs"))
    constants = ""
    if normalization is not None:
        mean, factor = (", ".join(map(_float, values)) for values in normalization)
        constants = (
            "\n// For Mat::substract_mean_normalize, after Mat::from_pixels with the channels R, G, B.\n"
            f"constexpr float kMean[3] = {{{mean}}};\nconstexpr float kFactor[3] = {{{factor}}};\n"
        )
    return f"""// The inputs, outputs and options of the model. Set the options before the model is loaded.
#pragma once

#include <cstddef>
#include <cstdlib>

#include "net.h"

namespace edgeq {{

struct Port {{
  const char* blob;
  int axes;
  int sizes[4];  // The last axis is the innermost.
  size_t count() const {{
    size_t product = 1;
    for (int i = 0; i < axes; ++i) product *= static_cast<size_t>(sizes[i]);
    return product;
  }}
}};

constexpr Port kInputs[] = {{{inputs}}};
constexpr Port kOutputs[] = {{{outputs}}};
constexpr int kCases = {cases};
constexpr float kTolerance = {_float(TOLERANCE)};
{constants}
// Set the options with which the answers were proven.
inline void configure(ncnn::Option& options, int threads) {{
  options.num_threads = threads;
{options}}}

}}  // namespace edgeq
"""


def _port(port: Mapping[str, Any]) -> str:
    sizes = blob_sizes(port["sizes"])
    return f"{{{json.dumps(port['blob'])}, {len(sizes)}, {{{', '.join(map(str, sizes))}}}}}"


def blob_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of ncnn's array for a tensor: those of the tensor, without a first axis of 1."""
    return tuple(sizes[1:] if len(sizes) > 1 and sizes[0] == 1 else sizes)


def _float(value: float) -> str:
    # The shortest text of a float32 is exact. The sum turns a negative zero into zero.
    return f"{np.float32(value) + np.float32(0)}f"


def _normalization(file: NcnnFile, samples: Samples) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return mean and factor of each channel, or None if the preprocessing of images is not one of such constants."""
    image = [port for port in file.signature["inputs"] if len(port["sizes"]) == 4 and port["sizes"][1] == 3]
    record = _preprocessing(samples)
    if len(image) != 1 or record is None:
        return None
    try:
        normalization = find_normalization(record)
    except ModelError:
        return None
    return normalization.mean, tuple(1 / deviation for deviation in normalization.std)


def _preprocessing(samples: Samples) -> Mapping[str, Any] | None:
    preprocess = getattr(samples, "preprocess", None)
    return plain(preprocess) if preprocess is not None else None


def _readme(artifact: Artifact, file: NcnnFile, samples: Samples, cases: int) -> str:
    preprocess = getattr(samples, "preprocess", None)
    steps = [step.describe() for step in preprocess.spec.steps] if preprocess is not None and preprocess.spec else []
    lines = [f"{number}. {step}" for number, step in enumerate(steps, 1)] or [
        "The inputs of the model are used as they are."
    ]
    if _normalization(file, samples) is not None:
        lines += ["", "`kMean` and `kFactor` in `model.h` contain the constants for `Mat::substract_mean_normalize`."]
    rows = ["| | blob | sizes | values |", "|---|---|---|---|"]
    for key in ("inputs", "outputs"):
        for port in file.signature[key]:
            sizes = blob_sizes(port["sizes"])
            rows.append(
                f"| {key[:-1]} {port['name']} | `{port['blob']}` | {' × '.join(map(str, sizes))} | {prod(sizes)} |"
            )
    values = {
        "NAME": artifact.title or artifact.model.stem,
        "BYTES": f"{len(file.param) + len(file.weights):,}",
        "CASES": str(cases),
        "PORTS": "\n".join(rows),
        "PREPROCESSING": "\n".join(lines),
    }
    text = (_TEXTS / "README.md").read_text("utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
