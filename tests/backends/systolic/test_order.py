"""Test the sorting of channels and the scale of each tile."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from edgeq.backends.systolic.channels import channel_groups, sort_channels
from edgeq.backends.systolic.lower import quantize_weights
from edgeq.backends.systolic.program import Conv, Fc
from edgeq.backends.systolic.simulate import simulate
from tests.backends.systolic.graphs import GraphBuilder, network_of, program_of


def chain() -> tuple[GraphBuilder, str]:
    """Return a dense, a depthwise and a dense layer, flattened, and a product. All inner orders can change."""
    b = GraphBuilder(np.random.default_rng(3))
    x = b.node("Relu", [b.conv("input", 12)], (1, 12, 9, 9))
    x = b.node("Relu", [b.conv(x, 12, groups=12)], (1, 12, 9, 9))
    x = b.pool("MaxPool", b.conv(x, 10), (3, 3), (3, 3))
    return b, b.gemm(b.flat(x), 7)


def test_sorted_channels_give_the_same_float_network() -> None:
    b, output = chain()
    model = b.model(output)
    network = sort_channels(network_of(model), 4)
    channels = network.channels
    assert len(channels) >= 3
    assert all(sorted(order) == list(range(len(order))) for order in channels.values())
    layers = [layer for layer in network.layers if isinstance(layer, Conv | Fc)]
    largest = np.abs(layers[2].weights).max(axis=(1, 2, 3))
    assert (np.diff(largest) <= 0).all()
    assert output not in channels


def test_a_sorted_program_follows_the_float_model() -> None:
    b, output = chain()
    model, samples = b.model(output), b.samples()
    program = program_of(model, samples)
    exact = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"input": samples})[0]
    tensors = simulate(program, {"input": samples}).tensors[output]
    assert np.abs(tensors - exact).max() < 0.05 * np.abs(exact).max()


def test_orders_that_are_seen_from_outside_stay() -> None:
    b = GraphBuilder(np.random.default_rng(4))
    tensor = b.conv("input", 12)
    joined = b.node("Concat", [b.conv(tensor, 12), b.conv(tensor, 8)], (1, 20, 9, 9), axis=1)
    smooth = b.node("Sigmoid", [b.conv(joined, 12)], (1, 12, 9, 9))
    groups = {g.tensors[0]: g for g in channel_groups(network_of(b.model(smooth)))}
    fixed = {name: group.fixed for name, group in groups.items()}
    assert fixed["input"] == "it is an input or output of the model"
    assert fixed[tensor] == ""
    assert "concatenates its channels" in fixed["conv1_out"]
    assert fixed["conv4_out"] == "a float part reads or computes it"


def test_each_tile_has_the_scale_of_its_largest_weight() -> None:
    weights = np.concatenate([np.full((4, 3), 1.0), np.full((4, 3), 0.01), np.full((2, 3), 0.0099)])
    made, _, tiles = quantize_weights(
        weights, np.zeros(10), input_scale=0.1, output_scale=0.2, dim=4, powers_of_two=False
    )
    # The last two tiles differ by less than a twentieth and share one scale.
    assert [(t.start, t.stop) for t in tiles] == [(0, 4), (4, 10)]
    assert [t.weight_scale for t in tiles] == [pytest.approx(1 / 127), pytest.approx(0.01 / 127)]
    assert made[:8].tolist() == [[127] * 3] * 8
    product = np.float32(np.float32(0.1) * np.float32(tiles[1].weight_scale))
    assert tiles[1].multiplier == float(product / np.float32(0.2))


def test_a_large_bias_never_leaves_int32() -> None:
    for largest in (0.0, 1e-12):
        _, bias, tiles = quantize_weights(
            np.full((1, 2), largest), np.array([3.0]), input_scale=0.1, output_scale=0.1, dim=4, powers_of_two=False
        )
        step = np.float32(np.float32(0.1) * np.float32(tiles[0].weight_scale))
        assert bias[0] * step == pytest.approx(3.0, rel=1e-4)


def test_scales_of_an_array_that_shifts_are_powers_of_two() -> None:
    rng = np.random.default_rng(5)
    made, _, tiles = quantize_weights(
        rng.standard_normal((8, 5)),
        rng.standard_normal(8),
        input_scale=0.25,
        output_scale=0.5,
        dim=4,
        powers_of_two=True,
    )
    assert all(np.log2(t.multiplier) % 1 == 0 for t in tiles)
    assert np.abs(made).max() <= 127
