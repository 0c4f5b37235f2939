"""Test what a float graph becomes: layers, reasons, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from edgeq.backends.systolic.program import (
    ArrayConfig,
    Clamp,
    Conv,
    Dequantize,
    Fc,
    Float,
    MaxPool,
    Network,
    Program,
    Quantize,
    ResidualAdd,
    array_config,
)
from edgeq.backends.systolic.simulate import simulate
from edgeq.errors import HardwareError, ModelError
from edgeq.scheme import ON_REQUEST
from tests import graphs
from tests.backends.systolic.graphs import GraphBuilder, network_of, program_of, run_all


def builder(*shape: int) -> GraphBuilder:
    return GraphBuilder(np.random.default_rng(0), input_shape=shape or (1, 4, 9, 9))


def program(b: GraphBuilder, *outputs: str, array: ArrayConfig | None = None) -> Program:
    return program_of(b.model(*outputs), b.samples(), array or ArrayConfig(dim=4))


def kinds(found: Program) -> list[str]:
    return [type(step).__name__ for step in found.steps]


def reasons(network: Network) -> dict[str, str]:
    return {
        name: reason for layer in network.layers if isinstance(layer, Float) for name, reason in layer.reasons.items()
    }


def test_activations_become_part_of_layers_before_scales_are_chosen() -> None:
    b = builder()
    made = b.conv("input", 8)
    model = b.model(b.node("Relu", [made], b.shapes[made]))
    samples = b.samples()
    found = program_of(model, samples)
    conv = next(step for step in found.steps if isinstance(step, Conv))
    assert conv.relu
    assert found.tensors[conv.output].origin == model.graph.output[0].name


@pytest.mark.parametrize("opset", [9, 13, 17])
def test_relu6_cuts_at_six_at_every_opset(opset: int) -> None:
    b = builder()
    clip = "Clip <min = 0.0, max = 0.05> (a)" if opset < 11 else "Clip (a, low, high)"
    text = f"""g (float[N, 4, 9, 9] input) => (float[N, 8, 7, 7] y) <float low = {{0}}, float high = {{0.05}}> {{
        [conv] a = Conv (input, weights)
        [clip] y = {clip}
    }}"""
    model = graphs.proto(text, opset=opset)
    model.graph.initializer.append(onnx.numpy_helper.from_array(b.weights(8, 4, 3, 3), "weights"))
    found = program_of(model, b.samples())
    conv = next(step for step in found.steps if isinstance(step, Conv))
    assert conv.relu
    # The scale alone clips at the bound, so no clamp is left.
    assert found.tensors[conv.output].scale == pytest.approx(0.05 / 127)
    assert kinds(found) == ["Quantize", "Conv", "Dequantize"]


def test_a_clamp_stays_where_the_scale_does_not_cut() -> None:
    b = builder()
    made = b.conv("input", 4)
    b.node("Clip", [made, b.constant(0.0), b.constant(0.05)], b.shapes[made])
    low = b.nodes[-1].output[0]
    found = program(b, b.node("Concat", [low, "input"], (1, 8, 9, 9), axis=1))
    assert any(isinstance(step, Clamp) and step.low == 0 and 0 < step.high < 127 for step in found.steps)


def test_sums_never_have_a_smaller_scale_than_their_operands() -> None:
    b = builder()
    left = b.conv("input", 4)
    total = b.node("Add", [left, "input"], b.shapes[left])
    found = program(b, b.node("Relu", [total], b.shapes[total]))
    step = next(step for step in found.steps if isinstance(step, ResidualAdd))
    assert step.relu
    assert max(step.left_multiplier, step.right_multiplier) <= 1


def test_an_operand_that_is_always_zero_does_not_widen_its_sum() -> None:
    """A residual branch whose gain was initialised to 0 has an empty range. With a scale of 1 for it, the sum had 8
    levels.
    """
    text = """g (float[N, 4, 9, 9] input) => (float[N, 4, 9, 9] y) {
        [own] a = Conv (input, weights)
        [first] b = Conv (input, nothing)
        [second] c = Conv (input, nothing)
        [empty] d = Add (b, c)
        [sum] e = Add (a, d)
        [out] y = Relu (e)
    }"""
    b = builder()
    model = graphs.proto(text)
    weights = b.weights(4, 4, 1, 1)
    for name, values in (("weights", weights), ("nothing", 0 * weights)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    samples = b.samples()
    found = program_of(model, samples)
    scales = {tensor.origin: tensor.scale for tensor in found.tensors.values() if tensor.scale is not None}
    assert scales["y"] == scales["a"]
    assert scales["a"] < 0.1
    assert {scales[name] for name in "bcd"} == {scales["y"]}
    adds = [step for step in found.steps if isinstance(step, ResidualAdd)]
    assert all(max(step.left_multiplier, step.right_multiplier) <= 1 for step in adds)


def test_pooling_is_fused_only_where_the_array_is_right() -> None:
    for pads, relu, fused in (((0,) * 4, False, True), ((1,) * 4, True, True), ((1,) * 4, False, False)):
        b = builder()
        made = b.conv("input", 4)
        made = b.node("Relu", [made], b.shapes[made]) if relu else made
        found = program(b, b.pool("MaxPool", made, (3, 3), (2, 2), pads))
        conv = next(step for step in found.steps if isinstance(step, Conv))
        assert (conv.pool is not None) == fused
        assert any(isinstance(step, MaxPool) for step in found.steps) != fused


def test_rounded_up_pooling_gets_padding_instead() -> None:
    b = builder()
    found = program(b, b.pool("MaxPool", b.conv("input", 4, pads=(0, 0, 0, 0)), (2, 2), (2, 2), ceil=True))
    pool = next(step for step in found.steps if isinstance(step, MaxPool))
    assert found.tensors[pool.output].shape == (1, 4, 4, 4)
    b = builder()
    found = program(b, b.pool("MaxPool", b.conv("input", 4), (2, 2), (2, 2), ceil=True))
    pool = next(step for step in found.steps if isinstance(step, MaxPool))
    assert pool.pads == (0, 0, 1, 1)


def test_rounded_up_pooling_with_automatic_padding_keeps_its_size() -> None:
    b = builder()
    text = """g (float[N, 4, 9, 9] input) => (float[N, 4, 5, 5] y) {
        [conv] a = Conv (input, weights)
        [pool] y = MaxPool <auto_pad = "SAME_UPPER", ceil_mode = 1, kernel_shape = [3, 2], strides = [2, 2]> (a)
    }"""
    model = graphs.proto(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(b.weights(4, 4, 1, 1), "weights"))
    samples = b.samples()
    found = program_of(model, samples)
    pool = next(step for step in found.steps if isinstance(step, MaxPool))
    assert (pool.pads, found.tensors[pool.output].shape) == ((1, 0, 1, 1), (1, 4, 5, 5))
    exact = run_all(model, samples, ["y"])["y"]
    np.testing.assert_allclose(simulate(found, {"input": samples}).tensors["y"], exact, atol=0.05 * np.abs(exact).max())


def test_a_relu_behind_pooling_moves_in_front_of_it() -> None:
    b = builder()
    pooled = b.pool("MaxPool", b.conv("input", 4), (3, 3), (2, 2))
    found = program(b, b.node("Relu", [pooled], b.shapes[pooled]))
    conv = next(step for step in found.steps if isinstance(step, Conv))
    assert conv.relu
    assert conv.pool is not None


def test_float_neighbours_share_one_bracket() -> None:
    b = builder()
    left = b.conv("input", 4)
    one = b.node("Sigmoid", [left], b.shapes[left])
    two = b.node("Tanh", [b.node("Mul", [one, left], b.shapes[left])], b.shapes[left])
    found = program(b, b.conv(two, 4))
    assert kinds(found) == ["Quantize", "Conv", "Dequantize", "Float", "Quantize", "Conv", "Dequantize"]
    bracket = next(step for step in found.steps if isinstance(step, Float))
    assert (
        sorted(reason.split(";")[0] for reason in bracket.reasons.values())
        == ["neither the array nor its core has an int8 form of this operator"] * 3
    )


def test_layers_in_float_have_a_reason() -> None:
    b = builder()
    made = b.conv("input", 4)
    average = b.pool("AveragePool", made, (3, 3), (2, 2), (1, 1, 1, 1))
    resized = b.node("Softmax", [average], b.shapes[average])
    network = network_of(b.model(resized))
    found = list(reasons(network).values())
    assert any("windows at the border" in reason for reason in found)


def test_excluded_nodes_stay_in_float() -> None:
    b = builder()
    first = b.conv("input", 4)
    model = b.model(b.conv(first, 4))
    network = network_of(model, exclude={"conv0": ON_REQUEST})
    assert reasons(network) == {"conv0": ON_REQUEST}
    network = network_of(model, op_types=["MatMul"])
    assert len(reasons(network)) == 2


def test_readers_of_hazardous_tensors_stay_in_float() -> None:
    b = builder()
    first = b.conv("input", 4)
    model = b.model(b.conv(first, 4))
    network = network_of(model, hazards={"input": "holds NaN"})
    assert reasons(network) == {"conv0": "tensor 'input' holds NaN"}


def test_grouped_and_dilated_convolutions_are_kept_whole() -> None:
    b = builder()
    first = b.conv("input", 6, groups=2)
    found = program(b, b.conv(first, 6, groups=3, dilations=(2, 2), pads=(0, 0, 0, 0)))
    assert [step.groups for step in found.steps if isinstance(step, Conv)] == [2, 3]


def test_a_bias_behind_a_product_is_its_bias() -> None:
    b = GraphBuilder(np.random.default_rng(0), input_shape=(1, 6))
    product = b.node("MatMul", ["input", b.constant(b.weights(6, 5))], (1, 5))
    model = b.model(b.node("Add", [product, b.constant(np.arange(5.0))], (1, 5)))
    samples = b.rng.standard_normal((3, 6)).astype(np.float32)
    found = program_of(model, samples)
    fc = next(step for step in found.steps if isinstance(step, Fc))
    assert np.all(np.diff(fc.bias.astype(np.int64)) != 0)
    assert kinds(found) == ["Quantize", "Fc", "Dequantize"]


def test_a_relu_behind_a_product_and_its_bias_is_part_of_it() -> None:
    b = GraphBuilder(np.random.default_rng(0), input_shape=(1, 6))
    product = b.node("MatMul", ["input", b.constant(b.weights(6, 5))], (1, 5))
    biased = b.node("Add", [product, b.constant(np.arange(5.0))], (1, 5))
    model = b.model(b.node("Relu", [biased], (1, 5)))
    found = program_of(model, b.rng.standard_normal((3, 6)).astype(np.float32))
    assert kinds(found) == ["Quantize", "Fc", "Dequantize"]
    assert next(step for step in found.steps if isinstance(step, Fc)).relu


def test_a_constant_that_adds_an_axis_is_no_bias() -> None:
    b = GraphBuilder(np.random.default_rng(0), input_shape=(1, 6))
    product = b.node("MatMul", ["input", b.constant(b.weights(6, 5))], (1, 5))
    model = b.model(b.node("Add", [product, b.constant(np.ones((1, 1, 5)))], (1, 1, 5)))
    found = program_of(model, b.rng.standard_normal((1, 6)).astype(np.float32))
    assert kinds(found) == ["Quantize", "Fc", "Dequantize", "Float"]


def test_conversions_happen_once() -> None:
    b = builder()
    left, right = b.conv("input", 4), b.conv("input", 4)
    found = program(b, b.node("Add", [left, right], b.shapes[left]))
    assert sum(isinstance(step, Quantize) for step in found.steps) == 1
    assert sum(isinstance(step, Dequantize) for step in found.steps) == 1


def test_sizes_have_to_be_fixed() -> None:
    b = builder()
    model = b.model(b.conv("input", 4))
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[0].dim_value = 8
    with pytest.raises(ModelError, match="fixed batch 8"):
        network_of(model)
    dims[0].dim_value = 1
    dims[2].ClearField("dim_value")
    dims[2].dim_param = "height"
    with pytest.raises(ModelError, match="height"):
        network_of(model)


def test_shapes_that_a_model_computes_are_known() -> None:
    b = builder()
    made = b.conv("input", 4)
    for node in (
        f"[shape] shape = Shape ({made})",
        f"[gather] batch = Gather (shape, {b.constant(0, np.int64)})",
        f"[unsqueeze] one = Unsqueeze (batch, {b.constant([0], np.int64)})",
        f"[concat] both = Concat <axis = 0> (one, {b.constant([-1], np.int64)})",
    ):
        b.nodes.append(onnx.parser.parse_node(node))
    flat = b.node("Reshape", [made, "both"], (1, int(np.prod(b.shapes[made]))))
    found = program(b, b.gemm(flat, 3))
    assert kinds(found) == ["Quantize", "Conv", "Rearrange", "Fc", "Dequantize"]


def test_shapes_may_be_outputs() -> None:
    b = builder()
    text = """g (float[1, 4, 9, 9] input) => (float[1, 4, 9, 9] y, int64[4] shape, int64[4] twice)
        <int64[1] two = {2}> {
        [conv] y = Conv (input, weights)
        [shape] shape = Shape (y)
        [second] other = Shape (y)
        [product] twice = Mul (other, two)
    }"""
    model = graphs.proto(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(b.weights(4, 4, 1, 1), "weights"))
    samples = b.samples(1)
    found = simulate(program_of(model, samples), {"input": samples}).tensors
    assert found["shape"].tolist() == [1, 4, 9, 9]
    assert found["twice"].tolist() == [2, 8, 18, 18]


def test_layers_of_a_network_are_typed() -> None:
    b = builder()
    left = b.conv("input", 4)
    clipped = b.node("Clip", [left, b.constant(-1.0), b.constant(2.0)], b.shapes[left])
    network = network_of(b.model(b.node("Add", [clipped, "input"], b.shapes[left])))
    assert [type(layer) for layer in network.layers] == [Conv, Clamp, ResidualAdd]


def test_arrays_are_checked() -> None:
    assert array_config({}) == ArrayConfig()
    chip = array_config({"dim": 32, "scratchpad_kib": 64, "accumulator_kib": 32, "scale_type": "shift"})
    assert (chip.dim, chip.scratchpad_rows, chip.accumulator_rows, chip.output_scale) == (32, 2048, 256, "shift")
    for table, message in (
        ({"dim": 12}, "dim is 12"),
        ({"element_type": "float32"}, "element_type"),
        ({"scale_type": "bfloat16"}, "scale_type"),
        ({"dataflow": "XS"}, "dataflow"),
        ({"dim": 32, "scratchpad_kib": 256, "scratchpad_bank_rows": 4096}, "scratchpad_kib = 256 is 8192 rows"),
    ):
        with pytest.raises(HardwareError, match=message):
            array_config(table)


def test_an_opset_9_model_has_its_numbers() -> None:
    b = builder()
    made = b.conv("input", 4)
    model = b.model(made)
    model.opset_import[0].version = 9
    onnx.checker.check_model(model)
    assert kinds(program_of(model, b.samples())) == ["Quantize", "Conv", "Dequantize"]


def test_an_output_without_axes_has_one_value_for_each_sample() -> None:
    b = builder()
    made = b.conv("input", 8)
    model = b.model(b.node("ReduceMax", [made], (1,), keepdims=0))
    model.graph.output[0].type.tensor_type.shape.ClearField("dim")
    samples = b.samples()
    found = program_of(model, samples)
    largest = simulate(found, {"input": samples}).tensors[found.outputs[0]]
    assert largest.shape == (len(samples),)
    assert len(set(largest.tolist())) > 1


def test_a_clamp_that_stays_leaves_its_layer_without_relu() -> None:
    """A layer before a separate clamp has no relu, because bias correction compares its values with those of the float
    model before the clamp.
    """
    b = GraphBuilder(np.random.default_rng(5))
    clipped = b.node("Clip", [b.conv("input", 8), b.constant(0.0), b.constant(0.5)], (1, 8, 9, 9))
    other = b.conv("input", 8)
    made = b.node("Concat", [clipped, other], (1, 16, 9, 9), axis=1)
    found = program_of(b.model(b.conv(made, 4)), b.samples())
    clamp = next(step for step in found.steps if isinstance(step, Clamp))
    conv = next(step for step in found.steps if isinstance(step, Conv) and step.output == clamp.input)
    assert (clamp.low, conv.relu) == (0, False)
    assert found.tensors[conv.output].origin == "conv0_out"


def test_an_activation_stays_behind_an_excluded_pooling() -> None:
    b = builder()
    pooled = b.pool("MaxPool", b.conv("input", 8))
    model = b.model(b.node("Relu", [pooled], b.shapes[pooled]))
    found = program_of(model, b.samples(), exclude={"maxpool1": ON_REQUEST})
    assert kinds(found) == ["Quantize", "Conv", "Dequantize", "Float"]


@pytest.mark.parametrize(
    ("op_type", "constants", "attributes"),
    [
        ("Pad", [np.array([0, 0, 1, 1, 0, 0, 1, 1]), np.float32(-1)], {}),
        ("Resize", [None, np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}),
        (
            "Resize",
            [np.array([0, 0, -0.5, -0.5, 1, 1, 1.5, 1.5], np.float32), np.array([1, 1, 1, 1], np.float32)],
            {
                "mode": "nearest",
                "coordinate_transformation_mode": "tf_crop_and_resize",
                "extrapolation_value": 1.0,
            },
        ),
    ],
)
def test_an_activation_stays_behind_what_computes_new_values(
    op_type: str, constants: list[np.ndarray | None], attributes: dict[str, Any]
) -> None:
    b = builder()
    made = b.conv("input", 8)
    places = [b.constant(values, values.dtype) if values is not None else "" for values in constants]
    shape = (1, 8, 11, 11) if op_type == "Pad" else (1, 8, 18, 18)
    moved = b.node(op_type, [made, *places], shape, **attributes)
    output = b.node("Clip", [moved, b.constant(-0.3), b.constant(0.3)], shape)
    model, samples = b.model(output), b.samples()
    found = program_of(model, samples)
    assert kinds(found) == ["Quantize", "Conv", "Dequantize", "Float"]
    exact = run_all(model, samples, [output])[output]
    np.testing.assert_allclose(simulate(found, {"input": samples}).tensors[output], exact, atol=0.05)
