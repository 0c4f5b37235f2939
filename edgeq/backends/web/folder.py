"""Write a folder for a web server, with the model, a self-test, a page, and a JavaScript module that contains the
hashes of the pinned runtime.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.answers.head import Head
from edgeq_device.engines.node_package import load_pins
from numpy.typing import NDArray

from edgeq.backends.base import Artifact
from edgeq.backends.web.preprocessing import web_recipe
from edgeq.data.samples import Samples
from edgeq.errors import ModelError
from edgeq.measure.inference import infer
from edgeq.model.files import model_files
from edgeq.model.graph import random_tensors
from edgeq.model.load import read_model, unchecked_signature
from edgeq.run.session import Engines
from edgeq.util.folders import shipped
from edgeq.util.marker import sha256

MANIFEST, SELFTEST, MODEL, MODULE = "edgeq-web.json", "selftest.bin", "model.onnx", "edgeq.mjs"
# JavaScript's typed arrays must begin at a multiple of their element's size, which is at most 8 bytes.
_ALIGNED = 8
_TYPES = frozenset(
    {"float32", "float64", "float16", "bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64))}
)


def write_folder(artifact: Artifact, samples: Samples, folder: Path, *, count: int) -> dict[str, Path]:
    """Create `folder`, write the files into it, and return their paths by name.

    Args:
        count: number of `samples` that become the self-test. Its expected outputs come from the wasm runtime.

    Raises:
        ModelError: an input or output has a type that browsers do not have.
        EngineError: the runtime refuses the model.
    """
    # The folder must be new: a file that was left in it would be listed as part of the bundle.
    folder.mkdir()
    copied = {name: _copied(file, folder / name) for name, file in _model_files(artifact.model)}
    cases = _write_cases(artifact, samples, folder / SELFTEST, count)
    first_input = unchecked_signature(artifact.model, artifact.model).inputs[0]
    manifest = {
        "name": artifact.title,
        "title": artifact.scheme.title,
        "model": [{**_record(file), "path": name} for name, file in copied.items()],
        "session": {"config": dict(artifact.session_options)},
        "selftest": {**_record(folder / SELFTEST), "cases": cases},
        "preprocessing": web_recipe(getattr(samples, "preprocess", None), first_input),
        "head": _describe_head(artifact.head, samples),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    static = shipped("targets") / "web"
    for file in sorted(static.iterdir()):
        shutil.copyfile(file, folder / file.name)
    write_module(folder)
    return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}


def write_module(folder: Path) -> Path:
    """Write the JavaScript module into `folder`, with the pins of the runtime, and return its path."""
    text = (shipped("targets") / "runtime" / "edgeq_device" / "engines" / MODULE).read_text("utf-8")
    # The module in the repository has no pins, so it also runs without edgeq. The copy gets those of this version.
    place, pinned = folder / MODULE, "export const PINNED = null;"
    assert text.count(pinned) == 1
    place.write_text(text.replace(pinned, f"export const PINNED = {json.dumps(dict(load_pins()), indent=1)};"), "utf-8")
    return place


def _model_files(model: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a model and their names in the folder, the model itself first."""
    yield MODEL, model
    yield from ((file.relative_to(model.parent).as_posix(), file) for file in model_files(model) if file != model)


def _copied(file: Path, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)
    return place


def _describe_head(head: Head | None, samples: Samples) -> dict[str, Any] | None:
    """Return the record of the head with its labels, which a bundle has in labels.txt, or None if there is no head."""
    if head is None:
        return None
    return {**head.to_dict(), "labels": [str(name) for name in head.labels or getattr(samples, "score_names", ())]}


def _record(file: Path) -> dict[str, Any]:
    return {"path": file.name, "sha256": sha256(file), "bytes": file.stat().st_size}


def _write_cases(artifact: Artifact, samples: Samples, place: Path, count: int) -> list[dict[str, Any]]:
    """Write the arrays of the self-test one after the other, and return the position of each."""
    content = bytearray()

    def append(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        listed = {}
        for name, array in arrays.items():
            if array.dtype.name not in _TYPES:
                # Strings and complex numbers, for example, have no typed array in JavaScript.
                raise ModelError(
                    f"tensor {name!r} is {array.dtype.name}, which browsers have no arrays for", "Export it as a number"
                )
            content.extend(b"\0" * (-len(content) % _ALIGNED))
            listed[name] = {"type": array.dtype.name, "shape": list(array.shape), "offset": len(content)}
            content.extend(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        return listed

    # A browser draws other random numbers.
    random = random_tensors(read_model(artifact.model).graph)

    def compared(outputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        return {name: array for name, array in outputs.items() if name not in random}

    # The wasm runtime computes the expected outputs, because its kernels may round differently from the CPU provider's.
    with Engines() as engines:
        session = engines.open(artifact.model, artifact.settings())
        cases = [
            {"inputs": append(dict(sample.inputs)), "outputs": append(compared(infer(session, sample)))}
            for sample in itertools.islice(samples, count)
        ]
    place.write_bytes(content)
    return cases
