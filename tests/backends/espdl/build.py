"""Build integer graphs from small models, and find Espressif's C runtime."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edgeq.backends.base import Artifact
from edgeq.backends.espdl.backend import EspdlBackend
from edgeq.backends.espdl.chips import EspFamily, family_named
from edgeq.backends.espdl.convert import lower_file
from edgeq.backends.espdl.interpret import run
from edgeq.backends.espdl.network import EspGraph
from edgeq.backends.espdl.selftest import checked_values, encoded_inputs, first_rows
from edgeq.backends.espdl.writer import write
from edgeq.data.sample import Sample
from edgeq.data.samples import open_samples
from edgeq.hardware.target import find_target
from edgeq.model.prepare import prepare_model
from tests.backends.build import Bench, bench
from tests.conftest import REPOSITORY, find_shared_data

PORTABLE_MARGIN = 1e-6
"""The margin of ties in the C code that the runtime uses on other machines than the P4."""


@dataclass(frozen=True)
class Built:
    """Hold an artifact with its samples."""

    artifact: Artifact
    bench: Bench
    target: str

    def family(self, rounding: str = "") -> EspFamily:
        family = EspdlBackend(find_target(self.target)).family
        return dataclasses.replace(family, rounding=rounding or family.rounding)

    def graph(self, rounding: str = "") -> EspGraph:
        return lower_file(self.artifact.model, self.family(rounding))

    def sample(self) -> Sample:
        return first_rows(self.bench.samples, 1)[0]

    def answer(self, rounding: str = "") -> NDArray[Any]:
        graph, family = self.graph(rounding), self.family(rounding)
        values = run(graph, encoded_inputs(graph, family, self.sample()), family.arithmetic)
        return values[graph.outputs[0].tensor]


def built(
    folder: Path, model: onnx.ModelProto, x: NDArray[Any] | None = None, target: str = "esp32-c6", **scheme: Any
) -> Built:
    """Build a model for a target, with the ranges of the samples `x`."""
    place = prepared_bench(folder, model, x)
    chosen = find_target(target).profile.scheme.replace(**scheme)
    backend = EspdlBackend(find_target(target))
    artifact = backend.build(place.prepared, place.ranges(chosen), chosen, folder / "int8.onnx")
    return Built(artifact, place, target)


def prepared_bench(folder: Path, model: onnx.ModelProto, x: NDArray[Any] | None) -> Bench:
    """Return `bench` for a model whose input has any name."""
    name = model.graph.input[0].name
    if x is None or name == "x":
        return bench(folder, model, x)
    source = folder / "model.onnx"
    source.write_bytes(model.SerializeToString())
    np.savez(folder / "x.npz", **{name: x})
    prepared = prepare_model(source, folder / "work")
    return Bench(prepared, open_samples(folder / "x.npz", prepared.signature), folder)


def portable(rounding: str) -> EspFamily:
    """Return the family of chips without SIMD, in a rounding, with the ties of the C code."""
    margin = PORTABLE_MARGIN if rounding == "half-even" else 0.0
    return dataclasses.replace(family_named("c"), rounding=rounding, tie_margin=margin)


class Witness:
    """Run files in Espressif's C runtime, compiled for this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def passes(self, file: Path, rounding: str) -> bool:
        """Return whether the self-test of a file passes."""
        return self._call(rounding, file).stdout.rstrip().endswith("test PASS")

    def answers(self, file: Path, rounding: str, inputs: NDArray[Any], type_: str) -> NDArray[Any]:
        """Return the outputs for several inputs, one after the other."""
        source, result = file.with_suffix(".in"), file.with_suffix(".out")
        source.write_bytes(inputs.tobytes())
        called = self._call(rounding, file, source, result)
        assert called.returncode == 0, called.stderr
        return np.fromfile(result, type_)

    def _call(self, rounding: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
        program = self._folder / f"espdl_{rounding.replace('-', '_')}"
        return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=300)


@cache
def find_witness() -> Witness:
    """Return the C runtime. `EDGEQ_ESPDL_WITNESS` names the folder of its programs. Without it, they are compiled once
    from shared/witness, which takes minutes.
    """
    named = os.environ.get("EDGEQ_ESPDL_WITNESS")
    if named:
        return Witness(Path(named))
    data = find_shared_data()
    script = data.parent / "witness" / "espdl" / "build.sh" if data is not None else None
    if script is None or not script.is_file():
        pytest.skip("shared/witness is not next to this checkout (or set EDGEQ_ESPDL_WITNESS)")
    if shutil.which("g++") is None or not Path("/usr/include/flatbuffers/flatbuffers.h").exists():
        pytest.skip("the C runtime needs g++ and libflatbuffers-dev")
    folder = REPOSITORY / ".pytest_cache" / "espdl"
    if not (folder / "espdl_half_even").exists():
        subprocess.run(["bash", script, folder], check=True, timeout=1800)
    return Witness(folder)


def write_test_file(graph: EspGraph, family: EspFamily, sample: Sample, file: Path) -> None:
    """Write the file of a graph with the values of one sample."""
    file.write_bytes(write(graph, blocked=False, tests=checked_values(graph, family, sample)))


def inputs_of(graph: EspGraph, family: EspFamily, samples: list[Sample]) -> list[Mapping[str, NDArray[Any]]]:
    return [encoded_inputs(graph, family, sample) for sample in samples]
