"""Test products of a sample's rows, as in transformers. The array computes [1, rows, K], [rows, K] and [rows, 1, K]."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edgeq.backends.systolic.compile import channel_means, correct_biases, corrected_layers
from edgeq.backends.systolic.program import Conv, Fc, Float, Program
from edgeq.backends.systolic.simulate import simulate
from edgeq.backends.systolic.to_onnx import host_reference_model
from edgeq.model.edit import to_proto
from edgeq.scheme import ON_REQUEST
from tests import graphs
from tests.backends.systolic.emit_c.programs import program_of as compiled
from tests.backends.systolic.graphs import program_of, run_all, signature_of

ROWS = 8
RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "w": RANDOM.normal(0, 0.4, (8, 8)),
    "turned": RANDOM.normal(0, 0.4, (8, 8)),
    "bias": RANDOM.normal(0, 1, 8),
}
FLATTENED = """g (float[1, 8, 8] input) => (float[1, 8, 8] y)
    <int64[2] rows = {-1, 8}> {
    [flat] a = Reshape (input, rows)
    [gemm] b = Gemm (a, w, bias)
    [back] c = Reshape (b, one)
    [between] d = Sigmoid (c)
    [flat2] e = Reshape (d, rows)
    [gemm2] f = Gemm <transB = 1> (e, turned)
    [back2] z = Reshape (f, one)
    [last] y = Mul (z, d)
}"""
# The sequence is the first axis, and a tensor without the batch bypasses a product.
SEQUENCE_FIRST = """g (float[1, 8, 8] input) => (float[1, 8, 8] y)
    <int64[2] rows = {-1, 8}, int64[3] sequence = {8, 1, 8}> {
    [turn] a = Transpose <perm = [1, 0, 2]> (input)
    [before] p = Sigmoid (a)
    [flat] b = Reshape (p, rows)
    [gemm] c = Gemm (b, w, bias)
    [beside] s = Mul (c, c)
    [back] d = Reshape (s, sequence)
    [sum] e = Sub (d, p)
    [product] f = MatMul (b, turned)
    [again] h = Reshape (f, sequence)
    [mix] i = Mul (e, h)
    [turn_back] y = Transpose <perm = [1, 0, 2]> (i)
}"""


def model(text: str) -> onnx.ModelProto:
    made = graphs.proto(text)
    made.graph.initializer.extend(
        onnx.numpy_helper.from_array(values.astype(np.float32), name) for name, values in WEIGHTS.items()
    )
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 8, 8]), "one"))
    return made


def samples(count: int = 5) -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(0, 1, (count, 8, 8)).astype(np.float32)


def floats(made: onnx.ModelProto, given: NDArray[np.float32], names: list[str]) -> dict[str, NDArray[np.float32]]:
    """Return tensors of the float model, which runs one sample at a time."""
    each = [run_all(made, one[None], names) for one in given]
    return {name: np.stack([found[name] for found in each]) for name in names}


def programmed(made: onnx.ModelProto, given: NDArray[np.float32]) -> Program:
    """Return the program with ranges from one sample, a little wider."""
    return program_of(made, 1.5 * given[:1])


@pytest.mark.parametrize("text", [FLATTENED, SEQUENCE_FIRST], ids=["flattened", "sequence first"])
def test_rows_are_multiplied_on_the_array(text: str) -> None:
    made, given = model(text), samples()
    found = programmed(made, given)
    products = [step for step in found.steps if isinstance(step, Fc)]
    assert [step.sources[0] for step in products] == [
        node.name for node in made.graph.node if node.op_type in ("Gemm", "MatMul")
    ]
    assert all(found.tensors[step.output].shape == (1, ROWS, 8) for step in products)
    simulated = simulate(found, {"input": given}).tensors["y"]
    exact = floats(made, given, ["y"])["y"][:, 0]
    assert 10 * np.log10((exact**2).sum() / ((simulated - exact) ** 2).sum()) > 25


@pytest.mark.parametrize("text", [FLATTENED, SEQUENCE_FIRST], ids=["flattened", "sequence first"])
def test_the_reference_model_gives_the_same(text: str) -> None:
    made, given = model(text), samples(1)
    found = programmed(made, given)
    twin = to_proto(host_reference_model(found, signature_of(made)))
    names = [name for name, tensor in found.tensors.items() if tensor.scale is not None]
    simulated, inside = simulate(found, {"input": given}, keep=names).tensors, run_all(twin, given, names)
    assert {name: int((simulated[name] != inside[name]).sum()) for name in names} == dict.fromkeys(names, 0)


@pytest.mark.parametrize("between", ["[soft] e = Softmax (b)", "[gemm2] e = Gemm <transB = 1> (b, turned, bias)"])
def test_parts_in_float_are_the_same_in_the_reference_model(between: str) -> None:
    """A Softmax and an excluded Gemm stay in float, although ONNX Runtime could make a QLinearSoftmax and a QGemm of
    them.
    """
    made = model(f"""g (float[1, 8, 8] input) => (float[1, 8, 8] y)
        <int64[2] rows = {{-1, 8}}> {{
        [flat] a = Reshape (input, rows)
        [gemm] b = Gemm (a, w, bias)
        {between}
        [gemm3] f = Gemm (e, w)
        [back] y = Reshape (f, one)
    }}""")
    found = program_of(made, samples(1), exclude={"gemm2": ON_REQUEST})
    twin = to_proto(host_reference_model(found, signature_of(made)))
    names = [name for name, tensor in found.tensors.items() if tensor.scale is not None]
    for given in samples(9)[:, None]:
        simulated, inside = simulate(found, {"input": given}, keep=names).tensors, run_all(twin, given, names)
        assert {name: int((simulated[name] != inside[name]).sum()) for name in names} == dict.fromkeys(names, 0)


def test_an_excluded_product_stays_in_float_by_its_name() -> None:
    made, given = model(FLATTENED), samples()
    found = program_of(made, given[:1], exclude={"gemm2": ON_REQUEST})
    assert [step.sources[0] for step in found.steps if isinstance(step, Fc)] == ["gemm"]
    exact = floats(made, given, ["y"])["y"][:, 0]
    assert np.abs(simulate(found, {"input": given}).tensors["y"] - exact).mean() < 0.05


def test_biases_of_rows_are_corrected_by_output() -> None:
    """Biases are corrected by output, also with as many rows as outputs, which makes the two easy to confuse."""
    made, given = model(FLATTENED), samples(16)
    found = programmed(made, given)
    axes = corrected_layers(found)
    assert set(axes.values()) == {-1}
    exact = floats(made, given, [*axes, "y"])
    means = {name: channel_means(exact[name], axis) for name, axis in axes.items()}
    corrected = correct_biases(found, {"input": given}, means)
    before, after = (simulate(program, {"input": given}, keep=["*"]).tensors for program in (found, corrected))
    for step in found.steps:
        if isinstance(step, Fc):
            tensor = found.tensors[step.output]
            assert tensor.scale is not None
            errors = [
                np.abs(channel_means(got[step.output], -1) * tensor.scale - means[tensor.origin]).mean()
                for got in (before, after)
            ]
            assert errors[1] <= errors[0] + 1e-3
    wrong = [float(((got["y"] - exact["y"][:, 0]) ** 2).sum()) for got in (before, after)]
    assert wrong[1] < 1.1 * wrong[0]


def layers(found: Program) -> list[str]:
    return [type(step).__name__ + "+relu" * getattr(step, "relu", False) for step in found.steps]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("""[gemm] b = Gemm (a, w)
            [relu] c = Relu (b)
            [gemm2] d = Gemm <transB = 1> (c, turned)
            [relu2] e = Relu (d)""", ["Fc+relu", "Fc+relu"]),
        ("""[biased] b = Gemm (a, w, bias)
            [one_bias] c = Gemm <transB = 1> (b, turned, half)
            [sum] e = Add (c, b)""", ["Fc", "Fc", "ResidualAdd"]),
        ("""[product] b = MatMul (a, w)
            [added] c = Add (bias, b)
            [relu] e = Relu (c)""", ["Fc+relu"]),
    ],
    ids=["activations", "sums", "biases"],
)  # fmt: skip
def test_operators_between_rows_run_on_the_array(nodes: str, expected: list[str]) -> None:
    made = model(f"""g (float[1, 8, 8] input) => (float[1, 8, 8] y)
        <int64[2] rows = {{-1, 8}}, float half = {{0.5}}> {{
        [flat] a = Reshape (input, rows)
        {nodes}
        [back] y = Reshape (e, one)
    }}""")
    given = samples()
    found = program_of(made, 4 * given[:1])
    assert [kind for kind in layers(found) if kind not in ("Quantize", "Dequantize", "Rearrange")] == expected
    simulated = simulate(found, {"input": given}).tensors["y"]
    exact = floats(made, given, ["y"])["y"][:, 0]
    assert 10 * np.log10((exact**2).sum() / ((simulated - exact) ** 2).sum()) > 25


def test_operands_that_differ_by_row_or_add_an_axis_stay_in_float() -> None:
    made = model("""g (float[1, 8, 8] input) => (float[1, 8, 8] y)
        <int64[2] rows = {-1, 8}, float[8, 1] each = {1, 2, 3, 4, 5, 6, 7, 8},
        float[1, 1, 8] whole = {1, 2, 3, 4, 5, 6, 7, 8}> {
        [flat] a = Reshape (input, rows)
        [gemm] b = Gemm (a, w, each)
        [product] c = MatMul (b, turned)
        [added] d = Add (c, each)
        [product2] e = MatMul (d, w)
        [axis] f = Add (e, whole)
        [back] y = Reshape (f, one)
    }""")
    given = samples()
    found = program_of(made, 4 * given[:1])
    kept = {name for step in found.steps if isinstance(step, Float) for name in step.reasons}
    assert {"gemm", "added", "axis"} <= kept
    simulated = simulate(found, {"input": given}).tensors["y"]
    exact = floats(made, given, ["y"])["y"][:, 0]
    assert 10 * np.log10((exact**2).sum() / ((simulated - exact) ** 2).sum()) > 25


def test_depthwise_layers_are_judged_by_outputs_without_batch_too(tmp_path: Path) -> None:
    """A depthwise layer leaves the array only if that improves the outputs. Here, one output has eight rows for each
    sample.
    """
    made = model("""g (float[1, 8, 8] input) => (float[8, 8] flat, float[1, 8, 6] y)
        <int64[2] rows = {-1, 8}> {
        [rows_] flat = Reshape (input, rows)
        [depthwise] y = Conv <group = 8> (input, d)
    }""")
    weights = np.random.default_rng(2).normal(0, 1, (8, 1, 3)) * np.exp2(-np.arange(8.0))[:, None, None]
    made.graph.initializer.append(onnx.numpy_helper.from_array(weights.astype(np.float32), "d"))
    onnx.save(made, tmp_path / "m.onnx")
    found, _ = compiled(tmp_path / "m.onnx", [{"input": sample[None]} for sample in samples(9)])
    assert [step.name for step in found.steps if isinstance(step, Conv)] == ["depthwise"]
