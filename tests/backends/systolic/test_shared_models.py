"""Real models give the same integers on every layer and lose little accuracy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.compile import compile_program
from edgeq.backends.systolic.estimate import place
from edgeq.backends.systolic.simulate import simulate
from edgeq.backends.systolic.to_onnx import host_reference_model
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.data.samples import open_samples
from edgeq.model.convert import to_proto
from edgeq.model.prepare import prepare_model
from tests.backends.systolic.graphs import run_all
from tests.backends.systolic.test_backend import SCHEME

SHARES = {
    "lenet_mnist": 0.99,
    "mlperf_tiny_vww": 0.99,
    "mobilenet_v1_0.25_224": 0.89,
    "resnet20_cifar10": 0.99,
}
COUNT = 6


def pictures(name: str, shape: tuple[int, ...], count: int) -> np.ndarray:
    """Return smooth noise, bright and dark. The models were not trained on it, but no integer depends on that."""
    rng = np.random.default_rng(len(name))
    coarse = rng.uniform(-1, 1, (count, shape[0], 8, 8))
    scale = -(-shape[1] // 8)
    return np.kron(coarse, np.ones((1, 1, scale, scale)))[:, :, : shape[1], : shape[2]].astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHARES))
def test_every_layer_has_the_same_integers(name: str, shared_data: Path, tmp_path: Path) -> None:
    prepared = prepare_model(shared_data / name / "model.onnx", tmp_path)
    spec = prepared.signature.inputs[0]
    assert spec.shape is not None
    x = pictures(name, tuple(int(d) for d in spec.shape[1:]), COUNT)
    samples = open_samples([{spec.name: row[None]} for row in x], prepared.signature)
    statistics = collect(prepared.model, samples, model_digest=prepared.digest)
    ranges = derive_ranges(statistics, "minmax", activation_type="int8", symmetric=True)
    program = compile_program(prepared, ranges, SCHEME, ArrayConfig(), samples)
    twin = to_proto(host_reference_model(program, prepared.signature))
    onnx.checker.check_model(twin, full_check=True)
    names = [n for n, tensor in program.tensors.items() if tensor.scale is not None]
    tensors = simulate(program, {spec.name: x}, keep=names).tensors
    expected = run_all(twin, x, names)
    assert {n: int((tensors[n] != expected[n]).sum()) for n in names} == dict.fromkeys(names, 0)
    assert place(program).array_share >= SHARES[name]
