from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import edgeq
from edgeq.cli import group
from edgeq.cli.convert import _agreements
from edgeq.errors import ModelError, OutputError, UsageError
from edgeq.retargeting.compare import RetargetComparison, compare_outputs
from edgeq.retargeting.run import retarget
from edgeq.run.session import SessionSettings
from edgeq.util.records import plain
from tests.graphs import proto
from tests.retargeting.networks import (
    CHANNELS,
    Net,
    example,
    kinds,
    random,
    residual_s8s8,
    run,
    tflite_int8,
    torch_qat,
    torch_shared,
)

pytestmark = pytest.mark.usefixtures("exact_kernels")

MODELS: list[Callable[[], onnx.ModelProto]] = [residual_s8s8, torch_qat, torch_shared, tflite_int8]


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "given.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("activation", ["uint8", "int8"])
def test_types_change_exactly(make: Callable[[], onnx.ModelProto], activation: str, tmp_path: Path) -> None:
    given = make()
    result = retarget(saved(given, tmp_path), tmp_path / "new.onnx", activation_type=activation, weight_type="int8")
    assert plain(result)["identical"]
    onnx.checker.check_model(onnx.load(result.output))
    for seed in range(3):
        inputs = example(given, seed)
        np.testing.assert_array_equal(run(result.output, inputs, optimized=False), run(given, inputs, optimized=False))
    edges = {"tflite_int8": 2}.get(make.__name__, 0) if activation == "uint8" else 0
    assert result.after.activations.get({"uint8": "int8", "int8": "uint8"}[activation], 0) <= edges


@pytest.mark.usefixtures("only_exact_kernels")
@pytest.mark.parametrize("make", MODELS)
def test_there_and_back(make: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    given = make()
    path = saved(given, tmp_path)
    u8 = retarget(path, tmp_path / "u8.onnx", activation_type="uint8")
    integer = retarget(u8.output, tmp_path / "integer.onnx", format="QOperator")
    back = retarget(integer.output, tmp_path / "back.onnx", format="QDQ")
    assert integer.after.format == "QOperator"
    assert back.after.format == "QDQ"
    assert back.after.pair == u8.after.pair
    assert "QLinearConv" in kinds(integer.output)
    assert "QLinearConv" not in kinds(back.output)
    assert compare_outputs(path, back.output) is not None
    assert plain(back)["largest_difference"] < 0.02
    inputs = example(given)
    # ONNX Runtime turns the Q/DQ pairs into the same integer operators.
    np.testing.assert_array_equal(run(integer.output, inputs), run(tmp_path / "u8.onnx", inputs))


def test_everything_of_a_residual_network_becomes_integer(tmp_path: Path) -> None:
    result = retarget(saved(residual_s8s8(), tmp_path), tmp_path / "new.onnx", format="QOperator")
    assert kinds(result.output) == [
        "QuantizeLinear",
        "QLinearConv",
        "QLinearConv",
        "QLinearAdd",
        "MaxPool",
        "QLinearGlobalAveragePool",
        "Flatten",
        "QLinearMatMul",
        "DequantizeLinear",
    ]
    assert not result.kept


def test_a_relu_above_the_bottom_becomes_a_clip_of_integers(tmp_path: Path) -> None:
    given = torch_qat()
    result = retarget(saved(given, tmp_path), tmp_path / "new.onnx", format="QOperator")
    assert "Relu" not in kinds(result.output)
    assert kinds(result.output).count("Clip") == 2
    assert any("weights stored as integers" in line for line in result.changes)
    assert any("stored transposed" in line for line in result.changes)
    assert result.before.format == "QDQ"
    assert plain(result)["largest_difference"] < 0.02


def test_modules_that_were_not_fused_run_on_integers(tmp_path: Path) -> None:
    result = retarget(saved(torch_shared(), tmp_path), tmp_path / "new.onnx", format="QOperator")
    assert kinds(result.output) == ["QuantizeLinear", "QLinearConv", "Clip", "QLinearConv", "DequantizeLinear"]
    assert any("multiples of their scale" in line for line in result.changes)


def test_an_int8_interface_stays(tmp_path: Path) -> None:
    given = tflite_int8()
    result = retarget(saved(given, tmp_path), tmp_path / "new.onnx", activation_type="uint8")
    graph = onnx.load(result.output).graph
    assert graph.input[0].type.tensor_type.elem_type == TensorProto.INT8
    assert graph.output[0].type.tensor_type.elem_type == TensorProto.INT8
    assert any("input or output of the model" in line for line in result.kept)
    assert plain(result)["identical"]


def test_old_opsets_are_raised(tmp_path: Path) -> None:
    net = Net()
    net.add("MaxPool", [net.pair("x", 0.03, np.uint8(100))], "p", kernel_shape=[2, 2])
    net.add("Relu", [net.pair("p", 0.03, np.uint8(100))], "y")
    result = retarget(saved(net.model(opset=10), tmp_path), tmp_path / "new.onnx", activation_type="int8")
    assert result.changes[0] == "opset 10 → 17"
    assert result.after.activations == {"int8": 2}


def test_unsigned_weights_become_signed_with_int8_activations(tmp_path: Path) -> None:
    net = Net()
    w = net.weight("w", random(CHANNELS, 3, 3, 3), dtype=np.uint8)
    net.add("Conv", [net.pair("x", 0.03, np.uint8(100)), w], "c")
    net.nodes.append(helper.make_node("Identity", [net.pair("c", 0.05, np.uint8(120))], ["y"], name="out"))
    result = retarget(saved(net.model(), tmp_path), tmp_path / "new.onnx", activation_type="int8")
    assert (result.before.pair, result.after.pair) == ("U8U8", "S8S8")
    assert plain(result)["identical"]


def test_missing_zero_points_and_fill_values(tmp_path: Path) -> None:
    """A change of type writes missing zero points (0 of uint8) and the fill value of an integer Pad explicitly."""
    net = Net()
    scale = net.constant("s", np.float32(0.03))
    net.add("QuantizeLinear", ["x", scale], "q")
    net.add("Pad", ["q", net.constant("pads", np.int64([0, 0, 1, 1, 0, 0, 1, 1]))], "padded")
    net.add("Concat", ["padded", "padded"], "both", axis=1)
    net.add("DequantizeLinear", ["both", scale], "y")
    given = net.model()
    result = retarget(saved(given, tmp_path), tmp_path / "new.onnx", activation_type="int8")
    assert plain(result)["identical"]
    assert result.after.activations == {"int8": 1}
    assert "2 zero points written explicitly that were the default" in result.changes


def test_operators_on_integers_keep_their_type(tmp_path: Path) -> None:
    net = Net()
    scale, zero = net.params("x", 0.03, np.int8(0))
    net.add("QuantizeLinear", ["x", scale, zero], "q")
    net.add("Abs", ["q"], "positive")
    net.add("DequantizeLinear", ["positive", scale, zero], "d")
    net.add("Relu", ["d"], "y")
    result = retarget(saved(net.model(), tmp_path), tmp_path / "new.onnx", activation_type="uint8")
    assert any("Abs Abs_positive computes with it" in line for line in result.kept)
    assert plain(result)["identical"]


def test_scales_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    for scale, problem in ((0.0, "has the scale 0"), (-1.0, "above 0"), (np.nan, "not finite")):
        net = Net()
        net.add("Relu", [net.pair("x", scale, np.int8(0))], "y")
        with pytest.raises(ModelError, match=problem):
            retarget(saved(net.model(), tmp_path), tmp_path / "new.onnx", format="QOperator")
    net = Net()
    net.weight("w", random(CHANNELS, 3, 3, 3), axis=1)
    net.constants["w_s"] = np.ones(5, np.float32)
    net.constants["w_z"] = np.zeros(5, np.int8)
    net.add("Conv", [net.pair("x", 0.1, np.int8(0)), "w_dq"], "y")
    with pytest.raises(ModelError, match="5 scales along an axis of 3"):
        retarget(saved(net.model(), tmp_path), tmp_path / "new.onnx", format="QOperator")


def test_distinguishes_float_dynamic_and_weight_only_models(tmp_path: Path) -> None:
    net = Net()
    net.add("Relu", ["x"], "y")
    path = saved(net.model(), tmp_path)
    with pytest.raises(ModelError, match="is not quantized"):
        retarget(path, tmp_path / "new.onnx", format="QDQ")
    edgeq_dynamic = Net()
    edgeq_dynamic.nodes.append(helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="dynamic"))
    edgeq_dynamic.add("DequantizeLinear", ["q", "s", "z"], "y")
    with pytest.raises(ModelError, match="only dynamic quantization"):
        retarget(saved(edgeq_dynamic.model(), tmp_path), tmp_path / "new.onnx", format="QDQ")


def test_requests_that_make_no_sense(tmp_path: Path) -> None:
    path = saved(residual_s8s8(), tmp_path)
    with pytest.raises(UsageError, match="there is nothing to change"):
        retarget(path, tmp_path / "new.onnx")
    with pytest.raises(UsageError, match="the format is 'qdq'"):
        retarget(path, tmp_path / "new.onnx", format="qdq")
    with pytest.raises(UsageError, match="no kernels"):
        retarget(path, tmp_path / "new.onnx", activation_type="int8", weight_type="uint8")
    (tmp_path / "new.onnx").write_text("kept")
    with pytest.raises(OutputError, match="exists"):
        retarget(path, tmp_path / "new.onnx", format="QOperator")
    assert (tmp_path / "new.onnx").read_text() == "kept"
    with pytest.raises(OutputError):
        retarget(path, path, format="QOperator", force=True)


def test_the_command_and_the_function(tmp_path: Path) -> None:
    path = saved(residual_s8s8(), tmp_path)
    arguments = ["retarget", str(path), "--activation-type", "uint8", "-o", str(tmp_path / "a.onnx")]
    done = CliRunner().invoke(group, arguments)
    assert done.exit_code == 0, done.output
    assert "QDQ S8S8" in done.output
    assert "the same to the last bit" in done.output
    record = plain(edgeq.retarget(path, tmp_path / "b.onnx", target="x86-64-avx512-vnni"))
    assert record["after"]["pair"] == "U8S8"
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    spoken = CliRunner().invoke(group, [*arguments, "--force", "--json"])
    printed = json.loads(spoken.stdout)
    keys = {"output", "before", "after", "changes", "kept", "identical", "by_default", "session_options"}
    assert keys <= printed.keys()


def test_equality_is_stated_for_the_sessions_that_were_compared(tmp_path: Path) -> None:
    """In a residual block, ONNX Runtime's optimised kernels round ties differently for U8S8 and S8S8."""
    result = retarget(saved(residual_s8s8(), tmp_path), tmp_path / "new.onnx", activation_type="uint8")
    assert result.comparison is not None
    assert result.by_default is not None
    found = compare_outputs(
        tmp_path / "given.onnx",
        result.output,
        (SessionSettings(), SessionSettings(config=result.session_options)),
    )
    assert result.by_default == found
    apart = replace(result, by_default=RetargetComparison(False, 0.004))
    assert list(_agreements(apart)) == [
        "outputs on noise, by default: within 0.40% of the largest",
        "outputs on noise, without the optimiser: the same to the last bit",
    ]
    same = replace(result, by_default=RetargetComparison(True, 0.0))
    assert list(_agreements(same)) == [
        "outputs on noise: the same to the last bit, by default and without the optimiser"
    ]
    assert len(list(_agreements(replace(result, by_default=None)))) == 1


def test_a_name_of_another_format_is_refused(tmp_path: Path) -> None:
    path = saved(residual_s8s8(), tmp_path)
    with pytest.raises(UsageError, match=r"android-xnnpack does not run \.onnx files\. Name the output new\.tflite"):
        retarget(path, tmp_path / "new.onnx", target="android-xnnpack")
    with pytest.raises(UsageError, match=r"generic-arm64 does not run \.tflite files\. Name the output new\.onnx"):
        retarget(path, tmp_path / "new.tflite", target="generic-arm64")
    with pytest.raises(UsageError, match=r"Name the output new\.onnx"):
        retarget(path, tmp_path / "new.tflite", activation_type="uint8")


def test_a_model_that_noise_does_not_run_through_is_not_compared(tmp_path: Path) -> None:
    """A model that random inputs cannot run is not compared: the file does not state that its free size must be 4."""
    net = Net()
    net.add("Reshape", [net.pair("x", 0.03, np.int8(0)), net.constant("shape", np.int64([2, 2]))], "square")
    net.add("Relu", ["square"], "y")
    given = net.model({"x": (TensorProto.FLOAT, [1])})
    given.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    result = retarget(saved(given, tmp_path), tmp_path / "new.onnx", activation_type="uint8")
    assert result.comparison is None
    assert any("not compared" in line for line in result.kept)


def test_bodies_of_control_flow_keep_what_they_read(tmp_path: Path) -> None:
    """Tensors that a branch reads keep their types: here a dequantized tensor, and the integers before it."""
    branches = []
    for name, op_type in (("then", "Neg"), ("else", "Abs")):
        inner = helper.make_node(op_type, ["p_dq"], [f"{name}_y"], f"{name}_{op_type}")
        result = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)
        branches.append(helper.make_graph([inner], name, [], [result]))
    net = Net()
    net.add("Conv", [net.pair("x", 0.03, np.int8(3)), net.weight("w", random(CHANNELS, 3, 3, 3))], "c", pads=[1] * 4)
    net.add("MaxPool", [net.pair("c", 0.05, np.int8(5))], "p", kernel_shape=[2, 2])
    net.pair("p", 0.05, np.int8(5))
    net.add("ReduceMax", ["p_dq"], "top", keepdims=0)
    net.add("Greater", ["top", net.constant("zero", np.float32(0))], "positive")
    net.nodes.append(
        helper.make_node("If", ["positive"], ["y"], "if", then_branch=branches[0], else_branch=branches[1])
    )
    path = saved(net.model(), tmp_path)
    for options in ({"activation_type": "uint8"}, {"format": "QOperator"}):
        result = retarget(path, tmp_path / "new.onnx", force=True, **options)
        assert result.comparison is not None
        assert result.comparison.largest < 0.02
    assert "QLinearConv" in kinds(tmp_path / "new.onnx")


def test_integer_operators_change_their_type(tmp_path: Path) -> None:
    """Integer operators change from S8S8, which has no fast kernels on x86 in the QOperator format, to U8S8."""
    first = retarget(saved(residual_s8s8(), tmp_path), tmp_path / "s8.onnx", format="QOperator")
    second = retarget(first.output, tmp_path / "u8.onnx", activation_type="uint8")
    assert (second.before.format, second.before.pair) == ("QOperator", "S8S8")
    assert (second.after.format, second.after.pair) == ("QOperator", "U8S8")
    assert kinds(second.output) == kinds(first.output)


@pytest.mark.parametrize(
    ("shape", "last", "wanted"),
    [
        ("2,4", "t = Transpose<perm = [1, 0]>(n) y = MatMul(d, t)", {"activation_type": "int8"}),
        ("4,2", "p = MatMul(d, n) o = QuantizeLinear(p, s, z) y = DequantizeLinear(o, s, z)", {"format": "QOperator"}),
    ],
)
def test_a_weight_with_a_scale_for_each_block_stays(
    shape: str, last: str, wanted: dict[str, str], tmp_path: Path
) -> None:
    axis = shape.split(",").index("4")
    given = proto(
        f"""net (float[1,4] x) => (float[1,2] y) <
            float s = {{0.5}}, uint8 z = {{7}}, int8[{shape}] w = {{1, 2, 3, 4, 5, 6, 7, 8}},
            float[2,2] ws = {{0.5, 1, 2, 4}}, int8[2,2] wz = {{0, 0, 0, 0}}> {{
            q = QuantizeLinear(x, s, z)
            d = DequantizeLinear(q, s, z)
            n = DequantizeLinear<axis = {axis}, block_size = 2>(w, ws, wz)
            {last}
        }}""",
        opset=21,
        ir_version=10,
    )
    result = retarget(saved(given, tmp_path), tmp_path / "new.onnx", **wanted)  # type: ignore[arg-type]
    assert result.comparison is not None
    assert result.comparison.identical


def test_no_least_weight_goes_where_kernels_overflow_on_it(tmp_path: Path) -> None:
    net = Net()
    weight = np.full((4, 3, 1, 1), -128, np.int8)
    scale, zero = net.params("w", np.full(4, 0.01), np.zeros(4, np.int8))
    net.add("DequantizeLinear", [net.constant("w", weight), scale, zero], "w_dq", axis=0)
    net.add("Conv", [net.pair("x", 0.05, np.int8(0)), "w_dq"], "c")
    net.add("Identity", [net.pair("c", 0.05, np.int8(0))], "y")
    path = saved(net.model(), tmp_path)
    for target, least in (("raspberry-pi-4", -127), ("raspberry-pi-5", -128)):
        result = retarget(path, tmp_path / f"{target}.onnx", target=target)
        made = [numpy_helper.to_array(t) for t in onnx.load(result.output).graph.initializer]
        assert min(values.min() for values in made if values.shape == weight.shape) == least
        assert any("12 weights below -127" in line for line in result.changes) is (least == -127)
        assert plain(result)["identical"] is (least == -128)  # the comparison uses the written file
    again = retarget(tmp_path / "raspberry-pi-4.onnx", tmp_path / "again.onnx", target="raspberry-pi-4")
    assert not any("weights below" in line for line in again.changes), "there are none left"


@pytest.mark.parametrize(
    ("make", "target", "problem", "fix"),
    [
        (tflite_int8, "nvidia-t4", "3 activations with a zero point other than 0", "edgeq quantize FLOAT.onnx -t nv"),
        (residual_s8s8, "gemmini", "3 weights with a scale for each channel", "given.onnx -t gemmini --data SAMPLES"),
        (torch_shared, "nvidia-t4", "", ""),
    ],
)
def test_refuses_models_that_the_target_has_no_kernels_for(
    make: Callable[[], onnx.ModelProto], target: str, problem: str, fix: str, tmp_path: Path
) -> None:
    path, output = saved(make(), tmp_path), tmp_path / "new.onnx"
    if not problem:
        assert retarget(path, output, target=target).after.pair == "S8S8"
        return
    with pytest.raises(ModelError, match=problem) as caught:
        retarget(path, output, target=target)
    assert fix in str(caught.value)
    assert not output.exists()
