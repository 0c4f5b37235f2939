"""Test `edgeq.tuning.recover.layers`: a network computes the same if a layer's readers undo a scaling of its output."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.model.graph import GraphIndex, name_of, readers
from edgeq.tuning.recover.layers import Weights, find_layers, input_channels, only_layers
from tests.tuning.recover.graphs import CHANNELS, nets, tensors_of
from tests.tuning.recover.nets import Net, run


@given(nets(), st.integers(0, 10**6))
@settings(max_examples=60)
def test_pairs_of_layers_keep_the_function(drawn: tuple, seed: int) -> None:
    """If only layers read a layer's output, any positive factors can move from the layer to its readers."""
    model, feed = drawn
    before = run(model, feed)
    layers = {layer.name: layer for layer in find_layers(model)}
    values = GraphIndex(model).values
    random = np.random.default_rng(seed)
    for layer in layers.values():
        weights = Weights(model)
        reading = only_layers(readers(values[layer.output]), layer.output, layer, layers)
        if values[layer.output].is_graph_output() or not reading or not weights.are_read_once(layer.weight, layer.bias):
            continue
        if not all(weights.are_read_once(reader.weight) for reader in reading):
            continue
        factor = np.exp(random.normal(0, 1, layer.outputs))
        weight, bias = weights.scaled_outputs(layer, 1 / factor)
        weights.replace(layer.weight, weight)
        if bias is not None:
            weights.replace(layer.bias, bias)
        for reader in reading:
            weights.scale_inputs(reader, factor)
    for a, b in zip(before, run(model, feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(np.abs(a).max())))


@given(nets())
@settings(max_examples=40)
def test_alone_means_that_nothing_else_changes(drawn: tuple) -> None:
    model, feed = drawn
    before = tensors_of(model, feed)
    weights = Weights(model)
    for layer in find_layers(model):
        if weights.are_read_once(layer.weight):
            changed = model.clone()
            Weights(changed).replace(layer.weight, np.zeros(layer.shape))
            assert [node.name for node in readers(changed.graph.initializers[layer.weight])] == [layer.name]
            after = tensors_of(changed, feed)
            made_before = [name_of(n.outputs[0]) for n in model.graph]
            for name in made_before[: made_before.index(layer.output)]:
                np.testing.assert_array_equal(before[name], after[name])


def test_weights_in_two_places_are_not_alone() -> None:
    net = Net()
    net.conv("x", "first", 2, 2, 1)
    net.conv("first_out", "second", 2, 2, 1)
    net.nodes[-1].input[1] = "first_w"
    net.nodes[-1].input[2] = "first_w"
    model = net.model({"x": [1, 2, 3, 3]}, ["second_out", "second_b"])
    weights = Weights(model)
    assert not weights.are_read_once("first_w")
    assert weights.are_read_once("first_b", "")
    assert weights.are_read_once("second_b"), "read by nobody but the outside"


def test_a_weight_that_is_also_an_output_is_not_alone() -> None:
    net = Net()
    net.conv("x", "first", 2, 2, 1)
    assert not Weights(net.model({"x": [1, 2, 3, 3]}, ["first_out", "first_w"])).are_read_once("first_w")


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_importance_of_input_channels(groups: int) -> None:
    net = Net()
    net.conv("x", "c", 4, 8, 3, groups=groups)
    model = net.model({"x": [1, 4, 5, 5]}, ["c_out"])
    (layer,) = find_layers(model)
    weight = Weights(model).array("c_w").astype(np.float64)
    wanted = np.zeros(4)
    for output in range(8):
        for place in range(4 // groups):
            wanted[output // (8 // groups) * (4 // groups) + place] += (weight[output, place] ** 2).sum()
    np.testing.assert_allclose(Weights(model).input_importance(layer), wanted)
    assert input_channels(layer) == CHANNELS


def test_channels_on_another_axis_are_not_the_same() -> None:
    """A MatMul after a convolution does not read the convolution's channels, because it reads the last axis."""
    net = Net()
    net.conv("x", "c", 4, 4, 1)
    net.node("MatMul", ["c_out", net.constant("w", net.random.normal(size=(4, 4)))], "y")
    model = net.model({"x": [1, 4, 4, 4]}, ["y"])
    conv, product = find_layers(model)
    layers = {layer.name: layer for layer in (conv, product)}
    assert only_layers([model.graph[1]], "c_out", conv, layers) == ()
    assert only_layers([model.graph[1]], "c_out", product, layers) == (product,)
    assert only_layers([], "c_out", conv, layers) == ()
