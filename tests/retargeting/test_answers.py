"""Test models from other tools: retargeting keeps what they compute, or leaves an operator as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.retargeting.run import retarget
from tests.graphs import proto
from tests.retargeting.networks import kinds, run

ACT = "float s = {0.02}, uint8 z = {120}, float t = {0.05}, uint8 u = {128}"
PER_CHANNEL = "float[2] ws = {0.01, 0.2}, int8[2] wz = {0, 0}"
TO_INTEGERS = {"format": "QOperator"}


def layer(op: str, weight: str, axis: int, shapes: tuple[str, str]) -> str:
    """Write a graph of one layer between Q and DQ, with a weight [...] that has a scale per channel along `axis`."""
    return f"""n (float[{shapes[0]}] x) => (float[{shapes[1]}] y) <{ACT}, {weight}, {PER_CHANNEL}> {{
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear<axis = {axis}>(w, ws, wz)
        m = {op}(d, v) o = QuantizeLinear(m, t, u) y = DequantizeLinear(o, t, u)
    }}"""


SQUARE = "int8[2,2] w = {1, 100, 90, 4}"
POINTWISE = "int8[2,2,1,1] w = {1, 100, 90, 4}"
STACKED = "int8[3,2,2] w = {1, 2, 3, 4, 50, 6, 7, 8, 9, 10, 110, 12}"
QGEMM = f"""n (float[2,2] x) => (float[2,2] y) <{ACT}, {SQUARE}, {PER_CHANNEL}, int32[%s] b = {{100, -30}}> {{
    q = QuantizeLinear(x, s, z) o = com.microsoft.QGemm<transB = 1>(q, s, z, w, ws, wz, b, t, u)
    y = DequantizeLinear(o, t, u)
}}"""
SOFTMAX = """n (float[2,3,4] x) => (float[2,3,4] y) <
    float s = {0.02}, uint8 z = {120}, float t = {0.00390625}, uint8 u = {0}> {
    q = QuantizeLinear(x, s, z) o = com.microsoft.QLinearSoftmax<axis = 1, opset = %d>(q, s, z, t, u)
    y = DequantizeLinear(o, t, u)
}"""
RESIZE = """n (float[1,1,4,4] x) => (float[1,1,6,6] y) <float s = {0.02}, uint8 z = {120},
    float[8] roi = {0, 0, 0, 0, 1, 1, 1.5, 1.5}, float[4] by = {1, 1, 1.5, 1.5}> {
    q = QuantizeLinear(x, s, z) r = Resize<%s>(q, roi, by) y = DequantizeLinear(r, s, z)
}"""
CROP = 'mode = "nearest", coordinate_transformation_mode = "tf_crop_and_resize"'


@pytest.mark.parametrize(
    ("text", "options", "operators"),
    [
        pytest.param(layer("MatMul", SQUARE, 0, ("2,2", "2,2")), TO_INTEGERS, "MatMul", id="rows of a matrix"),
        pytest.param(layer("MatMul", SQUARE, 1, ("2,2", "2,2")), TO_INTEGERS, "QLinearMatMul", id="columns"),
        pytest.param(layer("MatMul", SQUARE, -1, ("2,2", "2,2")), TO_INTEGERS, "QLinearMatMul", id="negative axis"),
        pytest.param(layer("MatMul", STACKED, 2, ("3,2,2", "3,2,2")), TO_INTEGERS, "MatMul", id="matrices"),
        pytest.param(layer("Conv", POINTWISE, 1, ("1,2,2,2", "1,2,2,2")), TO_INTEGERS, "Conv", id="input channels"),
        pytest.param(layer("Gemm<transB = 1>", SQUARE, 1, ("2,2", "2,2")), TO_INTEGERS, "Gemm", id="rows of Gemm"),
        pytest.param(layer("Gemm<transB = 1>", SQUARE, 0, ("2,2", "2,2")), TO_INTEGERS, "QGemm", id="columns of Gemm"),
        pytest.param(QGEMM % "1,2", {"format": "QDQ"}, "Gemm", id="a bias of two axes"),
        pytest.param(QGEMM % "1,2", {"activation_type": "int8"}, "QGemm", id="a bias of two axes stays"),
        pytest.param(QGEMM % "2,1", {"format": "QDQ"}, "QGemm", id="one bias for all channels"),
        pytest.param(SOFTMAX % 11, {"format": "QDQ"}, "QLinearSoftmax", id="softmax of opset 11"),
        pytest.param(SOFTMAX % 13, {"format": "QDQ"}, "Softmax", id="softmax of opset 13"),
        pytest.param(RESIZE % 'mode = "linear"', {"activation_type": "int8"}, "Resize", id="interpolated"),
        pytest.param(RESIZE % CROP, {"activation_type": "int8"}, "Resize", id="filled beside"),
        pytest.param(RESIZE % 'mode = "nearest"', {"activation_type": "int8"}, "Resize", id="repeated"),
    ],
)
def test_outputs_stay(text: str, options: dict[str, str], operators: str, tmp_path: Path) -> None:
    given = proto(text)
    onnx.save(given, tmp_path / "given.onnx")
    retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", **options)  # type: ignore[arg-type]
    assert operators in kinds(tmp_path / "new.onnx")
    shape = [size.dim_value for size in given.graph.input[0].type.tensor_type.shape.dim]
    inputs = {"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)}
    wanted, found = (run(model, inputs, optimized=False) for model in (given, tmp_path / "new.onnx"))
    np.testing.assert_allclose(found, wanted, atol=0.0501)  # one step of the output


@pytest.mark.parametrize("source", ["input", "output"])
def test_a_clamp_that_does_nothing_does_not_rename_what_it_reads(source: str, tmp_path: Path) -> None:
    """A clamp without effect keeps the names of inputs and outputs: one tensor cannot be two of them."""
    first = {"input": "(uint8[4] a) => (uint8[4] y)", "output": "(float[4] x) => (uint8[4] a, uint8[4] y)"}[source]
    made = {"input": "", "output": "a = QuantizeLinear(x, s, z)"}[source]
    given = proto(f"""n {first} <float s = {{0.02}}, uint8 z = {{0}}> {{
        {made} d = DequantizeLinear(a, s, z) r = Relu(d) y = QuantizeLinear(r, s, z)
    }}""")
    onnx.save(given, tmp_path / "given.onnx")
    result = retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", format="QOperator")
    assert result.comparison is not None
    assert result.comparison.identical
    after = onnx.load(tmp_path / "new.onnx").graph
    for side in ("input", "output"):
        assert [v.name for v in getattr(after, side)] == [v.name for v in getattr(given.graph, side)]


def test_integer_sums_are_not_quantized_again(tmp_path: Path) -> None:
    """int32 sums are not quantized again, because no QuantizeLinear gives int32."""
    text = f"""n (float[2,2] x) => (float[2,2] y) <{ACT}, {SQUARE}, {PER_CHANNEL}, int8 o = {{0}}, int32 i = {{0}}> {{
        q = QuantizeLinear(x, s, z) m = MatMulInteger(q, w, z, o) f = DequantizeLinear(m, s, i) r = Relu(f)
        v = DequantizeLinear<axis = 1>(w, ws, wz) d = DequantizeLinear(q, s, z) k = MatMul(d, v) y = Add(k, r)
    }}"""
    onnx.save(proto(text), tmp_path / "given.onnx")
    result = retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", activation_type="int8")
    assert result.comparison is not None
    assert result.comparison.identical


@pytest.mark.parametrize("read", ["d", "r"])
def test_half_floats_stay_half(read: str, tmp_path: Path) -> None:
    given = proto(
        f"""n (int8[2,2] x) => (float16[2,2] y) <float s = {{0.25}}, int8 z = {{3}}, {SQUARE}, int8 o = {{0}}> {{
            d = DequantizeLinear(x, s, z) r = Relu(d) v = DequantizeLinear(w, s, o) y = MatMul({read}, v)
        }}""",
        opset=19,
        ir_version=9,
    )
    given.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float16(0.25), "s"))
    onnx.save(given, tmp_path / "given.onnx")
    result = retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", activation_type="uint8", weight_type="int8")
    assert result.comparison is not None
    assert result.comparison.identical


@pytest.mark.parametrize(("opset", "floats"), [(21, ""), (23, "<output_dtype = 1>")])
@pytest.mark.parametrize("wanted", ["int8", "uint8"])
def test_types_that_are_attributes(opset: int, floats: str, wanted: str, tmp_path: Path) -> None:
    """Types from attributes stay right: the integers of a QuantizeLinear, the floats of a DequantizeLinear.

    The QuantizeLinear has no zero point here."""
    text = f"""n (float[2,4] x) => (float[2,4] y) <float s = {{0.02}}> {{
        q = QuantizeLinear<output_dtype = 3>(x, s) d = DequantizeLinear{floats}(q, s) y = Relu(d)
    }}"""
    onnx.save(proto(text, opset=opset, ir_version=10), tmp_path / "given.onnx")
    result = retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", activation_type=wanted)
    assert (result.before.activations, result.after.activations) == ({"int8": 1}, {wanted: 1})
    assert result.comparison is not None
    assert result.comparison.identical
    inputs = {"x": np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)}
    np.testing.assert_array_equal(run(tmp_path / "new.onnx", inputs), run(tmp_path / "given.onnx", inputs))


def test_branches_read_integers_that_keep_their_type(tmp_path: Path) -> None:
    """Integers that a branch dequantizes keep their type."""
    branches = [
        f"{place}_branch = {place} () => (float[4] {op}) {{ {op}_e = DequantizeLinear(q, s, z) {op} = {op}({op}_e) }}"
        for place, op in (("then", "Neg"), ("else", "Abs"))
    ]
    given = proto(f"""n (float[4] x) => (float[4] y) <float s = {{0.02}}, uint8 z = {{120}}, float o = {{0}}> {{
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) top = ReduceMax<keepdims = 0>(d)
        c = Greater(top, o) i = If(c) <{", ".join(branches)}> y = Add(i, d)
    }}""")
    onnx.save(given, tmp_path / "given.onnx")
    result = retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", activation_type="int8")
    assert result.comparison is not None
    assert result.comparison.identical
    assert any("the body of a control-flow node reads q" in line for line in result.kept)


def branched(pair: str) -> onnx.ModelProto:
    """Return a model whose integers only branches read. `pair` comes before the QuantizeLinear, which reads `b`."""
    return proto(f"""n (float[4] x, bool c) => (float[4] y) <float s = {{0.02}}, uint8 z = {{100}}> {{
        {pair} q = QuantizeLinear(b, s, z)
        y = If(c) <then_branch = t () => (float[4] o) {{ o = DequantizeLinear(q, s, z) }},
                   else_branch = e () => (float[4] n) {{ f = DequantizeLinear(q, s, z) n = Neg(f) }}>
    }}""")


def test_no_pair_stands_before_integers_that_only_branches_read(tmp_path: Path) -> None:
    """No Q/DQ pair comes before a Q that only branches read: ONNX Runtime 1.32's optimiser would end the process."""
    onnx.save(branched("d = QuantizeLinear(x, s, z) a = DequantizeLinear(d, s, z) b = Neg(a)"), tmp_path / "given.onnx")
    retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", activation_type="int8")
    assert kinds(tmp_path / "new.onnx") == ["QuantizeLinear", "DequantizeLinear", "Neg", "QuantizeLinear", "If"]


def test_an_optimiser_that_ends_the_process_ends_no_command(tmp_path: Path) -> None:
    onnx.save(branched("d = QuantizeLinear(x, s, z) b = DequantizeLinear(d, s, z)"), tmp_path / "given.onnx")
    result = retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", activation_type="int8")
    assert result.comparison is not None
    assert result.comparison.identical


def test_removes_branches_that_no_output_needs(tmp_path: Path) -> None:
    """An If that no output depends on is removed, although its branches read a dequantized tensor."""
    branches = [
        f"{place}_branch = {place} () => (float[4] {op}) {{ {op} = {op}(d) }}"
        for place, op in (("then", "Neg"), ("else", "Abs"))
    ]
    given = proto(f"""n (float[4] x, bool c) => (uint8[4] q, float[4] y) <float s = {{0.02}}, uint8 z = {{120}}> {{
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) i = If(c) <{", ".join(branches)}>
        y = DequantizeLinear(q, s, z)
    }}""")
    onnx.save(given, tmp_path / "given.onnx")
    retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", activation_type="int8")
    assert "If" not in kinds(tmp_path / "new.onnx")


def test_a_scale_in_a_list_is_written_as_a_number(tmp_path: Path) -> None:
    """A scale of shape [1] becomes a scalar. Otherwise ONNX Runtime's optimiser writes a node that it cannot load."""
    given = proto("""n (float[1,1,4,4] x) => (float[1,1,3,3] y) <float[1] s = {0.02}, int8[1] z = {4},
        uint8[1] u = {9}> {
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) a = AveragePool<kernel_shape = [2, 2]>(d)
        o = QuantizeLinear(a, s, u) y = DequantizeLinear(o, s, u)
    }""")
    onnx.save(given, tmp_path / "given.onnx")
    result = retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", activation_type="uint8")
    assert not result.kept
    inputs = {"x": np.random.default_rng(1).normal(size=(1, 1, 4, 4)).astype(np.float32)}
    np.testing.assert_allclose(run(tmp_path / "new.onnx", inputs), run(given, inputs, optimized=False), atol=0.021)


def test_a_missing_zero_point_has_the_type_of_the_integers(tmp_path: Path) -> None:
    """An added zero point has the type of its integers, even of com.microsoft's QuantizeLinear.

    onnx infers no type for that operator, and the default of uint8 would be wrong.
    """
    given = proto("""n (float[4] x) => (float[4] y) <float s = {0.02}, int8 z = {0}, int8 u = {-128}> {
        q = com.microsoft.QuantizeLinear(x, s, z) l = com.microsoft.QLinearSoftmax<opset = 13>(q, s, z, s, u)
        e = DequantizeLinear(l, s, u) p = com.microsoft.QuantizeLinear(e, s, z)
        d = com.microsoft.DequantizeLinear(p, s) y = Relu(d)
    }""")
    onnx.save(given, tmp_path / "given.onnx")
    result = retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", activation_type="uint8")
    assert set(result.after.activations) == {"uint8"}
    assert result.comparison is not None
    assert result.comparison.identical


def test_integer_operators_that_become_float_are_counted(tmp_path: Path) -> None:
    """Integer operators that become Q/DQ pairs are counted in the changes.

    In a model with both forms, types change between Q and DQ. An integer Softmax cannot be restored after that.
    """
    onnx.save(proto(SOFTMAX % 13), tmp_path / "given.onnx")
    result = retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", activation_type="int8")
    assert "1 integer operators → DequantizeLinear, operator, QuantizeLinear" in result.changes


def test_an_optimiser_that_has_to_be_off_is_named(tmp_path: Path) -> None:
    """The result names an optimiser of ONNX Runtime that must be off for the model to load.

    ONNX Runtime 1.32 moves an int8 pair before the Relu and gives it another pair's zero point.
    """
    given = proto(
        """n (float[1,1,4,4] x) => (float[1,1,5,5] y, uint8[1,1,5,5] q) <float s = {0.02}, uint8 z = {102},
        float low = {-0.3}, float high = {0.6}, float t = {0.0035}, uint8 v = {85}, float w = {0.00235},
        uint8 k = {0}> {
            i = QuantizeLinear(x, s, z) d = DequantizeLinear(i, s, z)
            m = MaxPool<kernel_shape = [2, 2], pads = [1, 1, 1, 1]>(d) c = Clip(m, low, high)
            p = QuantizeLinear(c, t, v) e = DequantizeLinear(p, t, v) r = Relu(e)
            q = QuantizeLinear(r, w, k) y = DequantizeLinear<output_dtype = 1>(q, w, k)
        }""",
        opset=23,
        ir_version=10,
    )
    onnx.save(given, tmp_path / "given.onnx")
    result = retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", activation_type="int8")
    refused = [line for line in result.kept if line.startswith("ONNX Runtime's optimiser has to be off: ")]
    try:
        run(tmp_path / "new.onnx", {"x": np.ones((1, 1, 4, 4), np.float32)})
        expected = 0
    except Exception:  # onnxruntime's exceptions have no common base
        expected = 1
    assert len(refused) == expected


def test_weights_in_branches_are_limited_too(tmp_path: Path) -> None:
    branches = [
        f"{place}_branch = {place} () => (float[1,1,2,2] {place}_y) {{ {place}_v = DequantizeLinear(w, s, o)"
        f" {place}_y = Conv(d, {place}_v) }}"
        for place in ("then", "else")
    ]
    given = proto(f"""n (float[1,1,2,2] x, bool c) => (float[1,1,2,2] y) <float s = {{0.02}}, int8 z = {{20}},
        int8[1,1,1,1] w = {{-128}}, int8 o = {{0}}> {{
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = If(c) <{", ".join(branches)}>
    }}""")
    onnx.save(given, tmp_path / "given.onnx")
    result = retarget(tmp_path / "given.onnx", tmp_path / "new.onnx", target="raspberry-pi-4")
    assert any(line.startswith("1 weights below -127") for line in result.changes)
