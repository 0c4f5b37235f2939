"""Make integer programs from real and random models, and compare what their C computes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.compile import compile_program
from edgeq.backends.systolic.emit_c.bundle import CBundle, in_c
from edgeq.backends.systolic.program import Program
from edgeq.backends.systolic.simulate import simulate
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.data.samples import open_samples
from edgeq.hardware.target import resolve
from edgeq.model.prepare import prepare_model
from tests.backends.systolic.emit_c.graphs import random_model

Arrays = Mapping[str, NDArray[Any]]

SMALL = ArrayConfig(dim=4, scratchpad_rows=64, accumulator_rows=32)
"""A DIM that makes many tiles of few channels, and memories that cut products into many pieces."""
ARRAYS = (ArrayConfig(), SMALL, ArrayConfig(dim=2, scratchpad_rows=64, accumulator_rows=32, dataflow="OS"))
ARRAYS += (ArrayConfig(output_scale="shift"),)
MODES: dict[tuple[str, ...], dict[str, Any]] = {
    ("ws",): {},
    ("ws", "matmul"): {},
    ("cpu",): {"rounding": "header"},
    ("os",): {"dataflow": "OS"},
}
"""Arguments of a bundle's program → how the simulator does the same."""

ROOT = Path(__file__).parents[4]


def model_cases(shared: Path | None) -> dict[str, tuple[Path, Path, Path | None]]:
    """Return model, samples and preprocessing by name: the demo, and the image classifiers in shared/data if that
    exists.
    """
    demo = ROOT / "edgeq" / "demo"
    cases: dict[str, tuple[Path, Path, Path | None]] = {"demo": (demo / "model.onnx", demo / "calibration.npz", None)}
    data = {
        "lenet_mnist": "lenet_mnist/t10k-images-idx3-ubyte.gz",
        "resnet20_cifar10": "cifar10/test_lossless_249.npz",
        "mlperf_tiny_vww": "mlperf_tiny_vww/data/calib_100.npz",
        "mobilenet_v1_0.25_224": "imagenet-sample/calib",
    }
    for name, samples in data.items() if shared is not None else ():
        assert shared is not None
        spec = ROOT / "benchmarks" / "specs" / f"{name}.toml"
        cases[name] = (shared / name / "model.onnx", shared / samples, spec)
    return cases


def random_program(seed: int, folder: Path, array: ArrayConfig | None = None) -> tuple[Program, Arrays]:
    """Return the program of a random model and two samples. `seed` also selects the array if none is given."""
    folder.mkdir(exist_ok=True)
    model, data = random_model(seed, folder / "model.onnx")
    cases = [{name: values[i : i + 1] for name, values in data.items()} for i in range(4)]
    program, inputs = program_of(model, cases, array or ARRAYS[seed % len(ARRAYS)])
    return program, {name: values[:2] for name, values in inputs.items()}


def program_of(
    model: Path, data: Any, array: ArrayConfig | None = None, *, preprocess: Any = None, count: int | None = None
) -> tuple[Program, Arrays]:
    """Return the deployed program, calibrated by the minima and maxima of its data, and the data as inputs [N, ...]."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_model(model, Path(folder))
        samples = open_samples(data, prepared.signature, preprocess=preprocess, count=count)
        statistics = collect(prepared.model, samples, model_digest=prepared.digest)
        ranges = derive_ranges(statistics, activation_type="int8", symmetric=True)
        scheme = resolve("gemmini").profile.scheme
        program = compile_program(prepared, ranges, scheme, array or ArrayConfig(), samples)
    names = [spec.name for spec in prepared.signature.inputs]
    return program, {name: np.concatenate([sample.inputs[name] for sample in samples]) for name in names}


def differing(bundle: CBundle, program: Program, inputs: Arrays, dump: bytes, **how: Any) -> dict[str, int]:
    """Return the number of values in layers.bin that differ from the simulator's, by layer; empty if all agree."""
    tensors = simulate(program, inputs, keep=[layer.tensor for layer in bundle.layers], **how).tensors
    counts: dict[str, int] = {}
    start = 0
    for layer in bundle.layers:
        expected = in_c(tensors[layer.tensor], layer.order)
        got = np.frombuffer(dump[start : start + expected.size], np.int8).reshape(expected.shape)
        start += expected.size
        if wrong := int(np.count_nonzero(got != expected)):
            counts[layer.label] = wrong
    assert start == len(dump)
    return counts
