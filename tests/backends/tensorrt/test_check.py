"""Test the checker on files that each break one rule. It checks what is written, not what was intended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from edgeq.backends.tensorrt.check import PlacementReport, check_placement
from edgeq.model.convert import from_proto

from .nets import bench, residual


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Build a good file with float32 layers. Return it and its source."""
    small = bench(tmp_path_factory.mktemp("check"), residual())
    return onnx.load(small.build(rest="float32").model), onnx.load(small.prepared.path)


def checked(model: onnx.ModelProto, source: onnx.ModelProto, reasons: dict[str, str] | None = None) -> PlacementReport:
    return check_placement(from_proto(model), from_proto(source), reasons or {})


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def node_named(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.name == name)


def constant_named(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(t for t in model.graph.initializer if t.name == name)


def pair_on(model: onnx.ModelProto, tensor: str, reader: str, place: int) -> None:
    """Put Q/DQ on `tensor` in front of input `place` of `reader`."""
    names = [constant_named(model, "x_scale").name, constant_named(model, "x_zero_point").name]
    q = helper.make_node("QuantizeLinear", [tensor, *names], [f"{tensor}_q"], f"{tensor}_q")
    dq = helper.make_node("DequantizeLinear", [f"{tensor}_q", *names], [f"{tensor}_dq"], f"{tensor}_dq")
    at = next(i for i, n in enumerate(model.graph.node) if n.name == reader)
    node_named(model, reader).input[place] = f"{tensor}_dq"
    model.graph.node.insert(at, dq)
    model.graph.node.insert(at, q)


def both_branches(model: onnx.ModelProto) -> None:
    add = node_named(model, "add1")
    pair_on(model, "c2", "add1", list(add.input).index("c2"))


def a_bias(model: onnx.ModelProto) -> None:
    # A Relu computes the bias, so that there is something to quantize.
    model.graph.node.insert(0, helper.make_node("Relu", ["b0"], ["b0r"], "bias-relu"))
    node_named(model, "stem").input.append("b0r")
    pair_on(model, "b0r", "stem", 2)


def a_bias_of_one_axis(model: onnx.ModelProto) -> None:
    node_named(model, "stem").input.append("b0")


def of_no_use(model: onnx.ModelProto) -> None:
    pair_on(model, "a2", "pool", 0)


def a_zero_point(model: onnx.ModelProto) -> None:
    constant_named(model, "x_zero_point").CopyFrom(numpy_helper.from_array(np.int8(3), "x_zero_point"))


def the_wrong_axis(model: onnx.ModelProto) -> None:
    dq = next(n for n in model.graph.node if n.input[0] == "w1_quantized")
    dq.attribute[0].i = 1


def a_scale_of_zero(model: onnx.ModelProto) -> None:
    constant_named(model, "x_scale").CopyFrom(numpy_helper.from_array(np.float32(0), "x_scale"))


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (both_branches, "Add add1: both branches are quantized"),
        (a_bias, "Conv stem: its bias 'b0r' is quantized"),
        (a_bias_of_one_axis, "Conv stem: ONNX Runtime makes its bias int32 at load"),
        (of_no_use, "GlobalAveragePool pool reads the pair on 'a2', which serves no fusion"),
        (a_zero_point, "its zero point is not 0"),
        (the_wrong_axis, "not along the outputs"),
        (a_scale_of_zero, "its scale is not above 0"),
    ],
)
def test_a_broken_rule_is_found(
    files: tuple[onnx.ModelProto, onnx.ModelProto], spoil: Callable[[onnx.ModelProto], None], finding: str
) -> None:
    good, source = files
    assert checked(good, source).findings == ()
    bad = copied(good)
    spoil(bad)
    assert any(finding in found for found in checked(bad, source).findings)


def test_a_layer_with_one_float_operand_is_not_int8(files: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    good, source = files
    half = copied(good)
    node_named(half, "stem").input[0] = "x"
    nodes_by_name = {n.name: n for n in checked(half, source, {"stem": "as a test"}).nodes}
    assert (nodes_by_name["stem"].precision, nodes_by_name["stem"].reason) == ("fp32", "as a test")


def test_macs_by_precision(files: tuple[onnx.ModelProto, onnx.ModelProto], tmp_path: Path) -> None:
    good, source = files
    placement = checked(good, source)
    layer = 16 * 16 * 9 * 64
    assert placement.macs == {"int8": 6 * layer + 5 * 16, "fp32": 0}
    assert placement.coverage().int8_mac_share == 1.0
