"""Execute each line of targets/rknn/dialect.toml in the compiler and its simulator."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.backends.base import Artifact, backend_for
from edgeq.backends.rknn import compile as compiling
from edgeq.backends.rknn.compile import Compiled, compile_model, unfused
from edgeq.backends.rknn.data import dialect
from edgeq.data.samples import Sample
from edgeq.errors import EngineError, ModelError
from edgeq.hardware.target import resolve
from edgeq.model.load import unchecked_signature
from tests.backends.build import random, residual
from tests.backends.rknn.build import RK3588, build_artifact, needs_toolkit
from tests.graphs import proto

pytestmark = needs_toolkit

IMAGE = "g (float[1, 8, 16, 16] x) => (float[N, C, H, W] y)"
WEIGHTS = {"w": random(8, 8, 3, 3), "b": random(8), "slope": np.abs(random(8, 1, 1))}

NORMALIZED = {"w": random(32, 32), "g": np.ones(32, np.float32), "b": np.zeros(32, np.float32)}


def compiled(model: Path, feed: Mapping[str, Any], folder: Path) -> tuple[Compiled, float]:
    """Compile a file. Return the result and the share of values for which its simulator agrees with ONNX Runtime."""
    folder.mkdir()
    sample = Sample("a", dict(feed))
    inputs = [spec.name for spec in unchecked_signature(model, model).inputs]
    compiled_form = compile_model(model, "rk3588", folder, inputs, [sample])
    (expected,) = unfused(model, [sample])
    pairs = zip(compiled_form.answers[0], expected.values(), strict=True)
    return compiled_form, float(np.mean([np.mean(a.reshape(-1) == b.reshape(-1)) for a, b in pairs]))


def share(model: onnx.ModelProto, folder: Path) -> float:
    artifact, _, samples = build_artifact(model, folder)
    return compiled(artifact.model, next(iter(samples)).inputs, folder / "compiled")[1]


def conv(tail: str) -> onnx.ModelProto:
    """Return a model of a convolution followed by the nodes `tail`."""
    return proto(f"{IMAGE} {{ c = Conv<pads = [1, 1, 1, 1]>(x, w, b) {tail} }}", WEIGHTS)


def test_a_model_is_compiled_and_equals_the_unfused_kernels(tmp_path: Path) -> None:
    artifact, prepared, samples = build_artifact(residual(), tmp_path)
    (tmp_path / "finished").mkdir()
    compiled_form = backend_for(RK3588).finished(artifact, prepared, samples, tmp_path / "finished")
    assert any(re.search(r"bit for bit on \d samples; never run on a chip", note) for note in compiled_form.notes)
    assert compiled_form.coverage is not None
    assert compiled_form.coverage.int8_mac_share == 1
    assert compiled_form.files["model.rknn"].read_bytes()[:4] == b"RKNN"
    assert [alternative.name for alternative in compiled_form.alternatives] == ["rk3588-compiled", "rk3588-cpu"]


def test_a_chip_without_python_gets_what_a_c_program_reads(tmp_path: Path) -> None:
    artifact, prepared, samples = build_artifact(residual(), tmp_path, target="rv1106")
    (tmp_path / "finished").mkdir()
    backend = backend_for(resolve("rv1106"))
    compiled_form = backend.finished(artifact, prepared, samples, tmp_path / "finished")
    assert set(compiled_form.files) == {"model.rknn", "model.tensors.json", "model.selftest.bin"}
    assert all(backend.owns(file) for file in compiled_form.files.values())
    assert not backend.owns(artifact.model)
    assert [alternative.name for alternative in compiled_form.alternatives] == ["rv1106-cpu"]
    forms = json.loads(compiled_form.files["model.tensors.json"].read_bytes())
    content = compiled_form.files["model.selftest.bin"].read_bytes()
    sample, case = next(iter(samples)), forms["cases"][0]
    stored = np.frombuffer(content, "<f4", 512, case["inputs"][0]).reshape(forms["inputs"][0]["shape"])
    assert np.array_equal(stored, sample.inputs["x"])
    (expected,) = unfused(artifact.model, [sample])
    assert np.array_equal(np.frombuffer(content, "<f4", 5, case["outputs"][0]), expected["y"].reshape(-1))


@pytest.mark.parametrize(
    "then",
    [
        "y = Relu(c)",
        "y = LeakyRelu<alpha = 0.1>(c)",
        "y = PRelu(c, slope)",
        "s = Sigmoid(c) y = Mul(c, s)",
        "y = HardSwish(c)",
        "y = Tanh(c)",
        "y = Add(c, x)",
        "r = Relu(c) d = Conv<pads = [1, 1, 1, 1]>(r, w) y = Add(d, r)",
        "y = Sub(c, x)",
        "y = Mul(c, x)",
        "y = Max(c, x)",
        "y = Concat<axis = 1>(c, x)",
        "y = GlobalAveragePool(c)",
        "y = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(c)",
        "y = MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(c)",
        "y = Softmax<axis = 1>(c)",
        "y = Transpose<perm = [0, 2, 3, 1]>(c)",
    ],
)
def test_operators_in_int8_differ_in_no_value(then: str, tmp_path: Path) -> None:
    assert share(conv(then), tmp_path) == 1


def test_zero_point_0_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeq.backends.rknn.dialect.shift_constants", lambda model: None)
    assert share(conv("y = Relu(c)"), tmp_path) < 0.99


@pytest.mark.parametrize("window", dialect().pool.windows)
def test_large_pools_are_exact_as_chains_alone(window: int, tmp_path: Path) -> None:
    pads = [(window - 1) // 2] * 4
    text = f"y = MaxPool<kernel_shape = [{window}, {window}], pads = {pads}, strides = [1, 1]>(c)"
    artifact, _, samples = build_artifact(conv(text), tmp_path)
    compiled_form, equal = compiled(artifact.model, next(iter(samples)).inputs, tmp_path / "chain")
    assert equal == 1
    assert {layer.place for layer in compiled_form.layers if layer.op_type == "MaxPool"} == {"NPU"}


def test_a_pair_inside_a_swish_costs_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeq.backends.rknn.dialect.open_swish", lambda model: None)
    assert share(conv("s = Sigmoid(c) y = Mul(c, s)"), tmp_path) < 0.99


def test_later_opsets_are_refused_in_one_line(tmp_path: Path) -> None:
    model = proto(f"{IMAGE} {{ y = Relu(x) }}", {}, opset=dialect().opset.newest + 1)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(EngineError, match="opset") as raised:
        compiled(tmp_path / "m.onnx", {"x": random(1, 8, 16, 16)}, tmp_path / "out")
    assert "\n" not in str(raised.value)


def test_a_large_average_is_compiled(tmp_path: Path) -> None:
    text = "g (float[1, 8, 25, 5] x) => (float[N, C, H, W] y)"
    model = proto(f"{text} {{ c = Conv(x, w) y = AveragePool<kernel_shape = [25, 5]>(c) }}", {"w": random(8, 8, 1, 1)})
    assert share(model, tmp_path) == 1


def test_a_sum_merged_into_a_kernel_costs_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "config_for", lambda name: {"target_platform": name, "optimization_level": 2})
    assert share(conv("y = Add(c, x)"), tmp_path) < 0.9


def test_a_product_behind_a_reshape_ends(tmp_path: Path) -> None:
    text = "g (float[1, 8, 4, 4] x) => (float[N, C] y) { r = Reshape(x, shape) y = Gemm(r, w) }"
    model = proto(text, {"shape": np.array([1, 128]), "w": random(128, 8)})
    assert share(model, tmp_path) == 1


def test_layer_normalization_without_attributes_is_compiled(tmp_path: Path) -> None:
    text = "g (float[1, 8, 32] x) => (float[N, C, K] y)"
    model = proto(f"{text} {{ m = MatMul(x, w) n = LayerNormalization(m, g, b) y = MatMul(n, w) }}", NORMALIZED)
    artifact, prepared, samples = build_artifact(model, tmp_path)
    (tmp_path / "finished").mkdir()
    compiled_form = backend_for(RK3588).finished(artifact, prepared, samples, tmp_path / "finished")
    assert compiled_form.coverage is not None
    assert compiled_form.coverage.int8_mac_share == 1


def test_an_operator_without_a_form_is_refused_though_the_build_succeeds(tmp_path: Path) -> None:
    onnx.save(proto(f"{IMAGE} {{ [act] y = Mish(x) }}", {}, opset=18), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"m\.onnx: rknn-toolkit2 .* does not support Mish \(act\)\. Export"):
        compiled(tmp_path / "m.onnx", {"x": random(1, 8, 16, 16)}, tmp_path / "out")


def test_an_excluded_layer_runs_in_float16(tmp_path: Path) -> None:
    artifact, prepared, samples = build_artifact(residual(), tmp_path, exclude=("last",))
    (tmp_path / "finished").mkdir()
    compiled_form: Artifact = backend_for(RK3588).finished(artifact, prepared, samples, tmp_path / "finished")
    assert any("float16 layers round" in note for note in compiled_form.notes)
    assert compiled_form.coverage is not None
    assert "last" in {node.name for node in compiled_form.coverage.float_nodes}


def test_level_3_is_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = dialect()
    higher = dataclasses.replace(table, level=dataclasses.replace(table.level, optimization_level=3))
    artifact, _, samples = build_artifact(residual(width=16), tmp_path)
    feed = next(iter(samples)).inputs
    monkeypatch.setattr(compiling, "dialect", lambda: higher)
    assert compiled(artifact.model, feed, tmp_path / "third")[1] < 1
