from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeq.model.clean import tidy
from edgeq.model.fold import fold_batch_norms

from .build import model, node, rand, run, write


def norm(channels: int, source: str = "m", **attributes: Any) -> tuple[onnx.NodeProto, dict[str, Any]]:
    parameters = {
        "scale": rand(channels, seed=11),
        "shift": rand(channels, seed=12),
        "mean": rand(channels, seed=13),
        "var": np.abs(rand(channels, seed=14)) + 0.05,
    }
    return node("BatchNormalization", [source, *parameters], ["y"], name="bn", **attributes), parameters


def fold(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, int, list[str]]:
    graph = ir.serde.deserialize_model(proto)
    tidy(graph)
    kept: list[str] = []
    folded = fold_batch_norms(graph, kept)
    tidy(graph)
    return ir.serde.serialize_model(graph), folded, kept


def check(tmp_path: Path, proto: onnx.ModelProto, shape: Sequence[int]) -> onnx.ModelProto:
    after, folded, kept = fold(proto)
    assert (folded, kept) == (1, [])
    assert "BatchNormalization" not in [n.op_type for n in after.graph.node]
    assert after.graph.node[0].name == "layer"
    assert after.graph.node[0].output[0] == "y"
    onnx.checker.check_model(after) if after.graph.output[0].type.tensor_type.HasField("shape") else None
    feeds = {"x": rand(*shape, seed=99)}
    before = run(write(tmp_path / "before.onnx", proto), feeds)[0]
    np.testing.assert_allclose(
        run(write(tmp_path / "after.onnx", after), feeds)[0], before, rtol=1e-4, atol=1e-5 * np.abs(before).max()
    )
    return after


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_convolutions(tmp_path: Path, op_type: str, group: int, bias: bool) -> None:
    out = 8
    shape = (out, 4 // group, 3, 3) if op_type == "Conv" else (4, out // group, 3, 3)
    weights = {"w": rand(*shape), **({"b": rand(out, seed=1)} if bias else {})}
    bn, parameters = norm(out, epsilon=1e-3)
    layer = node(op_type, ["x", *weights], ["m"], name="layer", group=group)
    after = check(tmp_path, model([layer, bn], {"x": [1, 4, 6, 6]}, weights={**weights, **parameters}), (1, 4, 6, 6))
    assert {t.name for t in after.graph.initializer} == {"w", "b" if bias else "layer.bias"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    transposed=st.booleans(),
    alpha=st.sampled_from([1.0, 0.5, -2.0]),
    beta=st.sampled_from([1.0, 0.0, 0.25]),
    bias=st.sampled_from([None, (), (1,), (5,), (1, 5), (1, 1)]),
)
def test_gemm(tmp_path: Path, transposed: bool, alpha: float, beta: float, bias: tuple[int, ...] | None) -> None:
    weights: dict[str, Any] = {"w": rand(5, 4) if transposed else rand(4, 5)}
    if bias is not None:
        weights["b"] = np.asarray(rand(*bias, seed=2), np.float32)
    bn, parameters = norm(5)
    layer = node("Gemm", ["x", *weights], ["m"], name="layer", transB=int(transposed), alpha=alpha, beta=beta)
    check(tmp_path, model([layer, bn], {"x": [3, 4]}, weights={**weights, **parameters}), (3, 4))


def test_gemm_with_a_bias_per_row_is_left(tmp_path: Path) -> None:
    bn, parameters = norm(5)
    layer = node("Gemm", ["x", "w", "b"], ["m"], name="layer")
    weights = {"w": rand(4, 5), "b": rand(3, 1), **parameters}
    _, folded, kept = fold(model([layer, bn], {"x": [3, 4]}, weights=weights))
    assert folded == 0
    assert "not one constant per channel" in kept[0]


def test_two_dimensional_matmul_becomes_gemm(tmp_path: Path) -> None:
    bn, parameters = norm(5)
    layer = node("MatMul", ["x", "w"], ["m"], name="layer")
    after = check(tmp_path, model([layer, bn], {"x": [3, 4]}, weights={"w": rand(4, 5), **parameters}), (3, 4))
    assert [n.op_type for n in after.graph.node] == ["Gemm"]


def rows_and_norm(shape: list[int]) -> onnx.ModelProto:
    """Return a product [2, 3, 4] x [4, 5], reshaped to `shape`, and a normalization of 5 channels."""
    bn, parameters = norm(5)
    layer = node("MatMul", ["x", "w"], ["p"], name="layer")
    flat = node("Reshape", ["p", "s"], ["m"], name="flat")
    weights = {"w": rand(4, 5), "s": np.array(shape), **parameters}
    proto = model([layer, flat, bn], {"x": [2, 3, 4]}, weights=weights)
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("m", onnx.TensorProto.FLOAT, [6, *shape[1:]]))
    return proto


def test_a_product_whose_rows_were_reshaped(tmp_path: Path) -> None:
    proto = rows_and_norm([-1, 5])
    after, folded, kept = fold(proto)
    assert (folded, kept) == (1, [])
    assert [n.op_type for n in after.graph.node] == ["MatMul", "Add", "Reshape"]
    feeds = {"x": rand(2, 3, 4, seed=99)}
    before, found = (run(write(tmp_path / "m.onnx", which), feeds)[0] for which in (proto, after))
    np.testing.assert_allclose(found, before, rtol=1e-4, atol=1e-4)


def test_a_product_whose_channels_were_split_is_left() -> None:
    _, folded, kept = fold(rows_and_norm([2, 5, 3]))
    assert not folded
    assert kept == ["BatchNormalization 'bn' stays: its channels are not known to be those of 'layer'"]


def test_nodes_left_for_one_reason_are_one_line() -> None:
    parts = [norm(4) for _ in range(6)]
    for number, (bn, _) in enumerate(parts):
        bn.name, bn.input[0], bn.output[0] = f"bn{number}", "x", f"y{number}"
    outputs = [f"y{number}" for number in range(6)]
    _, _, kept = fold(model([bn for bn, _ in parts], {"x": [1, 4, 2, 2]}, outputs, weights=parts[0][1]))
    assert len(kept) == 1
    assert kept[0].startswith("BatchNormalization 'bn0', 'bn1', 'bn2', 'bn3' and 2 more stay: no Conv")


def test_shared_weights_are_not_changed_for_the_other_user(tmp_path: Path) -> None:
    bn, parameters = norm(8)
    nodes = [
        node("Conv", ["x", "w", "b"], ["m"], name="layer"),
        node("Conv", ["x", "w", "b"], ["z"], name="other"),
        bn,
    ]
    weights = {"w": rand(8, 4, 3, 3), "b": rand(8, seed=3), **parameters}
    proto = model(nodes, {"x": [1, 4, 6, 6]}, ["y", "z"], weights=weights)
    after, folded, _ = fold(proto)
    assert folded == 1
    assert {t.name for t in after.graph.initializer} == {"w", "b", "w.folded", "b.folded"}
    feeds = {"x": rand(1, 4, 6, 6)}
    for a, b in zip(
        run(write(tmp_path / "a.onnx", proto), feeds), run(write(tmp_path / "b.onnx", after), feeds), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


class TestLeftAlone:
    def refuse(self, nodes: list[onnx.NodeProto], weights: dict[str, Any], expected: str, **kwargs: Any) -> None:
        proto = model(nodes, {"x": [1, 4, 6, 6]}, weights=weights, **kwargs)
        after, folded, kept = fold(proto)
        assert folded == 0
        assert expected in kept[0]
        assert "BatchNormalization" in [n.op_type for n in after.graph.node]

    def test_no_layer_before_it(self) -> None:
        bn, parameters = norm(4)
        self.refuse([node("Relu", ["x"], ["m"]), bn], parameters, "no Conv")

    def test_result_used_elsewhere(self) -> None:
        bn, parameters = norm(8)
        conv = node("Conv", ["x", "w"], ["m"], name="layer")
        weights = {"w": rand(8, 4, 3, 3), **parameters}
        self.refuse([conv, bn, node("Relu", ["m"], ["z"])], weights, "used elsewhere", outputs=["y", "z"])
        self.refuse([conv, bn], weights, "used elsewhere", outputs=["y", "m"])

    def test_training_mode(self) -> None:
        bn, parameters = norm(8, training_mode=1)
        conv = node("Conv", ["x", "w"], ["m"], name="layer")
        self.refuse([conv, bn], {"w": rand(8, 4, 3, 3), **parameters}, "training mode")

    def test_computed_weights(self) -> None:
        bn, parameters = norm(4)
        conv = node("Conv", ["x", "x"], ["m"], name="layer")
        self.refuse([conv, bn], parameters, "not constant")

    def test_variance_that_makes_no_sense(self) -> None:
        bn, parameters = norm(8)
        parameters["var"] = -np.ones(8, np.float32)
        conv = node("Conv", ["x", "w"], ["m"], name="layer")
        self.refuse([conv, bn], {"w": rand(8, 4, 3, 3), **parameters}, "variance is not positive")
