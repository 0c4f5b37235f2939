from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeq.graph.convert import from_proto
from edgeq.graph.index import GraphIndex
from edgeq.measure.match_activations import ActivationMatch, match_activations
from tests.measure.quantized_models import Quantized, read_graph

FOLDED = ["x", "stem_act", "dw_act", "pw_out", "sum", "pooled", "features", "logits"]
WHOLE = ["x", "stem_out", "stem_act", "dw_out", "dw_act", "pw_out", "sum", "pooled", "features", "logits"]


def matched(quantized: Quantized, form: str) -> dict[str, ActivationMatch]:
    found = match_activations(read_graph(quantized.prepared.path), read_graph(quantized.models[form]))
    return {match.name: match for match in found}


@pytest.mark.parametrize(
    ("form", "names"),
    [("u8s8", FOLDED), ("u8u8-per-tensor", FOLDED), ("qoperator", FOLDED), ("s8s8", WHOLE), ("dynamic", WHOLE)],
)
def test_every_format_in_order_of_execution(quantized: Quantized, form: str, names: list[str]) -> None:
    found = matched(quantized, form)
    assert list(found) == names
    assert found["x"].is_input
    assert not found["pw_out"].is_input


@pytest.mark.parametrize("form", ["u8s8", "qoperator"])
def test_a_folded_activation_counts_for_the_layer_before_it(quantized: Quantized, form: str) -> None:
    found = matched(quantized, form)
    assert (found["stem_act"].node, found["stem_act"].op_type, found["stem_act"].folded) == ("stem", "Conv", "Relu")
    assert (found["dw_act"].node, found["dw_act"].folded) == ("depthwise", "Clip")
    assert (found["pw_out"].node, found["pw_out"].folded) == ("pointwise", "")
    how = found["dw_act"].params
    assert how is not None
    assert how.range == pytest.approx((0, 2), abs=0.01)


def test_qdq_gives_floats_and_qoperator_integers(quantized: Quantized) -> None:
    qdq, qoperator = matched(quantized, "u8s8"), matched(quantized, "qoperator")
    assert not any(match.integer for match in qdq.values())
    # A graph output is dequantized under the old name; what the layer gives has another.
    assert qdq["logits"].computed == "logits_QuantizeLinear_Input"
    assert all(match.integer for match in qoperator.values() if not match.is_input)
    assert qoperator["stem_act"].computed == "stem_out_quantized"
    for name in qdq:
        one, other = qdq[name].params, qoperator[name].params
        assert one is not None
        assert other is not None
        assert one.range == other.range


def test_dynamic_scales_are_told_from_floats(quantized: Quantized) -> None:
    found = matched(quantized, "dynamic")
    assert {name for name, match in found.items() if match.dynamic} == {"x", "stem_act", "dw_act", "features"}
    assert all(match.params is None for match in found.values())


def small(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> GraphIndex:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return GraphIndex(from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])))


REFERENCE = [
    helper.make_node("Neg", ["x"], ["a"], "neg"),
    helper.make_node("Relu", ["a"], ["b"], "relu"),
    helper.make_node("Abs", ["b"], ["y"], "abs"),
]


def test_a_relu_in_another_name_is_not_folded() -> None:
    # The range of `a` goes below zero, and something else computes the Relu: nothing stands for `b`.
    graph = small(
        [
            helper.make_node("Neg", ["x"], ["a"], "neg"),
            helper.make_node("QuantizeLinear", ["a", "s", "z"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
            helper.make_node("Max", ["d", "zero"], ["m"], "max"),
            helper.make_node("Abs", ["m"], ["y"], "abs"),
        ],
        {"s": np.float32(0.1), "z": np.uint8(128), "zero": np.float32(0)},
    )
    assert [match.name for match in match_activations(small(REFERENCE, {}), graph)] == ["x", "a", "y"]


def test_renamed_tensors_are_matched_by_the_node_that_makes_them() -> None:
    graph = small(
        [
            helper.make_node("Neg", ["x"], ["t1"], "neg"),
            helper.make_node("Relu", ["t1"], ["t2"], "relu"),
            helper.make_node("QuantizeLinear", ["t2", "s", "z"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
            helper.make_node("Abs", ["d"], ["y"], "abs"),
        ],
        {"s": np.float32(0.1), "z": np.uint8(0)},
    )
    found = {match.name: match for match in match_activations(small(REFERENCE, {}), graph)}
    assert {name: match.computed for name, match in found.items()} == {"x": "x", "a": "t1", "b": "t2", "y": "y"}
    assert found["b"].params is not None
    assert found["a"].params is None


def test_integers_and_constants_are_no_activations() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], "shape"),
        helper.make_node("Neg", ["c"], ["negated"], "constant"),
        helper.make_node("Add", ["x", "negated"], ["y"], "add"),
    ]
    both = small(nodes, {"c": np.float32(1)})
    assert [match.name for match in match_activations(both, both)] == ["x", "y"]
