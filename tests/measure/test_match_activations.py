from __future__ import annotations

import pytest

from edgeq.measure.match_activations import ActivationMatch, match_activations
from edgeq.model.graph import GraphIndex
from tests.graphs import model
from tests.measure.quantized_models import Quantized, read_graph

FOLDED = ["x", "stem_act", "dw_act", "pw_out", "sum", "pooled", "features", "logits"]
WHOLE = ["x", "stem_out", "stem_act", "dw_out", "dw_act", "pw_out", "sum", "pooled", "features", "logits"]


def matched(quantized: Quantized, form: str) -> dict[str, ActivationMatch]:
    matches = match_activations(read_graph(quantized.prepared.path), read_graph(quantized.models[form]))
    return {match.name: match for match in matches}


@pytest.mark.parametrize(
    ("form", "names"),
    [("u8s8", FOLDED), ("u8u8-per-tensor", FOLDED), ("qoperator", FOLDED), ("s8s8", WHOLE), ("dynamic", WHOLE)],
)
def test_every_format_in_order_of_execution(quantized: Quantized, form: str, names: list[str]) -> None:
    matches = matched(quantized, form)
    assert list(matches) == names
    assert matches["x"].is_input
    assert not matches["pw_out"].is_input


@pytest.mark.parametrize("form", ["u8s8", "qoperator"])
def test_a_folded_activation_counts_for_the_layer_before_it(quantized: Quantized, form: str) -> None:
    matches = matched(quantized, form)
    assert (matches["stem_act"].node, matches["stem_act"].op_type, matches["stem_act"].folded) == (
        "stem",
        "Conv",
        "Relu",
    )
    assert (matches["dw_act"].node, matches["dw_act"].folded) == ("depthwise", "Clip")
    assert (matches["pw_out"].node, matches["pw_out"].folded) == ("pointwise", "")
    params = matches["dw_act"].params
    assert params is not None
    assert params.range == pytest.approx((0, 2), abs=0.01)


def test_qdq_gives_floats_and_qoperator_integers(quantized: Quantized) -> None:
    qdq, qoperator = matched(quantized, "u8s8"), matched(quantized, "qoperator")
    assert not any(match.integer for match in qdq.values())
    # A graph output is dequantized under the old name. The layer's own result has another name.
    assert qdq["logits"].computed == "logits_QuantizeLinear_Input"
    assert all(match.integer for match in qoperator.values() if not match.is_input)
    assert qoperator["stem_act"].computed == "stem_out_quantized"
    for name in qdq:
        qdq_params, qoperator_params = qdq[name].params, qoperator[name].params
        assert qdq_params is not None
        assert qoperator_params is not None
        assert qdq_params.range == qoperator_params.range


def test_dynamic_scales_are_distinguished_from_floats(quantized: Quantized) -> None:
    matches = matched(quantized, "dynamic")
    assert {name for name, match in matches.items() if match.dynamic} == {"x", "stem_act", "dw_act", "features"}
    assert all(match.params is None for match in matches.values())


REFERENCE = "net (float[N,2] x) => (float[N,2] y) { [neg] a = Neg(x) [relu] b = Relu(a) [abs] y = Abs(b) }"


def graph_of(body: str) -> GraphIndex:
    return GraphIndex(model(body))


def test_a_relu_in_another_name_is_not_folded() -> None:
    # The range of `a` includes negative values, and another node computes the Relu: no tensor represents `b`.
    graph = graph_of("""net (float[N,2] x) => (float[N,2] y) <float s = {0.1}, uint8 z = {128}, float zero = {0}> {
        [neg] a = Neg(x)
        q = QuantizeLinear(a, s, z)
        d = DequantizeLinear(q, s, z)
        [max] m = Max(d, zero)
        [abs] y = Abs(m)
    }""")
    assert [match.name for match in match_activations(graph_of(REFERENCE), graph)] == ["x", "a", "y"]


def test_renamed_tensors_are_matched_by_the_node_that_makes_them() -> None:
    graph = graph_of("""net (float[N,2] x) => (float[N,2] y) <float s = {0.1}, uint8 z = {0}> {
        [neg] t1 = Neg(x)
        [relu] t2 = Relu(t1)
        q = QuantizeLinear(t2, s, z)
        d = DequantizeLinear(q, s, z)
        [abs] y = Abs(d)
    }""")
    matches = {match.name: match for match in match_activations(graph_of(REFERENCE), graph)}
    assert {name: match.computed for name, match in matches.items()} == {"x": "x", "a": "t1", "b": "t2", "y": "y"}
    assert matches["b"].params is not None
    assert matches["a"].params is None


def test_integers_and_constants_are_no_activations() -> None:
    both = graph_of("""net (float[N,2] x) => (float[N,2] y) <float c = {1}> {
        [shape] shape = Shape(x)
        [constant] negated = Neg(c)
        [add] y = Add(x, negated)
    }""")
    assert [match.name for match in match_activations(both, both)] == ["x", "y"]
