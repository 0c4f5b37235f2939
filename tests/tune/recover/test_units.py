"""`edgeq.tune.recover.units`: every node of a kind in one unit, layers with what follows them."""

from __future__ import annotations

from hypothesis import given, settings

from edgeq.tune.recover.layers import find_layers
from edgeq.tune.recover.units import find_units
from tests.tune.recover.graphs import nets
from tests.tune.recover.nets import Net, two_gates


@given(nets())
@settings(max_examples=30)
def test_units_share_out_all_nodes(drawn: tuple) -> None:
    model, _ = drawn
    nodes = [node.name for node in model.graph.node]
    units = find_units(model, {node.op_type for node in model.graph.node})
    assert sorted(name for unit in units for name in unit.nodes) == sorted(nodes)
    assert [unit.name for unit in units] == sorted((unit.name for unit in units), key=nodes.index)
    layers = [layer.name for layer in find_layers(model)]
    made = {output for node in model.graph.node for output in node.output}
    for unit in units:
        assert sum(name in layers for name in unit.nodes) <= 1
        assert not set(unit.tensors) & set(unit.reads)
        assert set(unit.reads) <= made | {"x"} | {n for n in unit.reads if n.endswith("_cond")}


def test_a_layer_and_its_activation_are_one() -> None:
    units = find_units(two_gates(), {"Conv"})
    assert [(unit.name, len(unit.nodes)) for unit in units] == [
        ("first", 3),
        ("second", 3),
        ("depthwise", 3),
        ("last", 1),
    ]
    assert units[0].tensors == ("first_out", "first_act_gate", "first_act")
    assert units[1].reads == ("first_act",)


def test_only_units_with_a_node_of_the_types() -> None:
    net = Net()
    net.conv("x", "c", 2, 2, 1)
    net.node("Relu", ["c_out"], "r")
    net.node("Softmax", ["r"], "s")
    net.node("MaxPool", ["s"], "p", kernel_shape=[1, 1])
    model = net.model({"x": [1, 2, 3, 3]}, ["p"])
    assert [unit.nodes for unit in find_units(model, {"Conv", "MaxPool"})] == [("c", "r_Relu"), ("p_MaxPool",)]
    assert [unit.nodes for unit in find_units(model, {"Relu"})] == [("c", "r_Relu")]
