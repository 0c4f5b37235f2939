"""Test `recover.costs`: every node is in one unit, and a layer's unit includes the nodes that follow it."""

from __future__ import annotations

from hypothesis import given, settings

from edgeq.tuning.recover.layers import find_layers
from edgeq.tuning.recover.units import find_units
from tests.tuning.recover.graphs import nets
from tests.tuning.recover.nets import two_gates


@given(nets())
@settings(max_examples=30)
def test_units_share_out_all_nodes(drawn: tuple) -> None:
    model, _ = drawn
    nodes = [node.name for node in model.graph]
    units = find_units(model)
    assert sorted(name for unit in units for name in unit.nodes) == sorted(nodes)
    assert [unit.name for unit in units] == sorted((unit.name for unit in units), key=nodes.index)
    layers = [layer.name for layer in find_layers(model)]
    made = {output.name for node in model.graph for output in node.outputs}
    for unit in units:
        assert sum(name in layers for name in unit.nodes) <= 1
        assert not set(unit.tensors) & set(unit.reads)
        assert set(unit.reads) <= made | {"x"} | {n for n in unit.reads if n.endswith("_cond")}


def test_a_layer_and_its_activation_are_one() -> None:
    units = find_units(two_gates())
    assert [(unit.name, len(unit.nodes)) for unit in units] == [
        ("first", 3),
        ("second", 3),
        ("depthwise", 3),
        ("last", 1),
    ]
    assert units[0].tensors == ("first_out", "first_act_gate", "first_act")
    assert units[1].reads == ("first_act",)
