"""Test 1-D convolution and pooling, as in audio. The array reads [1, C, L] as [1, C, 1, L]."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from edgeq.backends.systolic.estimate import coverage
from edgeq.backends.systolic.program import AveragePool, Conv, Float, MaxPool
from edgeq.backends.systolic.simulate import simulate
from edgeq.backends.systolic.to_onnx import host_reference_model
from edgeq.model.convert import to_proto
from tests import graphs
from tests.backends.systolic.graphs import program_of, run_all, signature_of

NET = """g (float[N, 4, 30] input) => (float[N, 3] y) {
    [shift] s = Sigmoid (input)
    [conv] a = Conv <pads = [3, 2], dilations = [2], strides = [2]> (s, w)
    [relu] b = Relu (a)
    [depthwise] c = Conv <group = 8, auto_pad = "SAME_UPPER"> (b, d, bias)
    [sum] e = Add (c, b)
    [pool] p = MaxPool <kernel_shape = [3], strides = [2], ceil_mode = 1> (e)
    [average] q = AveragePool <kernel_shape = [2]> (p)
    [whole] m = GlobalAveragePool (q)
    [flat] f = Flatten (m)
    [fc] y = Gemm <transB = 1> (f, g)
}"""
SHAPES = {"w": (8, 4, 5), "d": (8, 1, 3), "bias": (8,), "g": (3, 8)}


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    onnx_model = graphs.proto(NET)
    onnx_model.graph.initializer.extend(
        onnx.numpy_helper.from_array(random.normal(0, 0.4, shape).astype(np.float32), name)
        for name, shape in SHAPES.items()
    )
    return onnx_model


def samples(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 1, (count, 4, 30)).astype(np.float32)


def test_all_layers_are_integers(model: onnx.ModelProto) -> None:
    inputs = samples(8)
    int8_program = program_of(model, inputs)
    names = {
        step.sources[0]: type(step) for step in int8_program.steps if isinstance(step, Conv | MaxPool | AveragePool)
    }
    kinds = {"conv": Conv, "depthwise": Conv, "pool": MaxPool, "average": AveragePool, "whole": AveragePool}
    assert names == kinds
    assert [step.sources for step in int8_program.steps if isinstance(step, Float)] == [("shift",)]
    assert coverage(int8_program, {}).int8_mac_share == 1
    exact = run_all(model, inputs, ["y"])["y"]
    error = simulate(int8_program, {"input": inputs}).tensors["y"] - exact
    assert 10 * np.log10((exact**2).sum() / (error**2).sum()) > 25


def test_the_reference_model_gives_the_same(model: onnx.ModelProto) -> None:
    inputs = samples(3)
    int8_program = program_of(model, inputs)
    twin = to_proto(host_reference_model(int8_program, signature_of(model)))
    names = [name for name, tensor in int8_program.tensors.items() if tensor.scale is not None]
    simulated, inside = simulate(int8_program, {"input": inputs}, keep=names).tensors, run_all(twin, inputs, names)
    assert {name: int((simulated[name] != inside[name]).sum()) for name in names} == dict.fromkeys(names, 0)


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
def test_ceil_mode_whose_last_window_is_left_out(kind: str) -> None:
    """ONNX infers a length of 9 but ONNX Runtime gives 8. The layers that follow use 8."""
    onnx_model = graphs.proto(f"""g (float[N, 4, 16] input) => (float[N, c, l] y) {{
        [pool] p = {kind} <kernel_shape = [1], strides = [2], ceil_mode = 1> (input)
        [turn] t = Transpose <perm = [0, 2, 1]> (p)
        [conv] y = Conv (t, w)
    }}""")
    random = np.random.default_rng(0)
    onnx_model.graph.initializer.append(
        onnx.numpy_helper.from_array(random.normal(0, 0.4, (5, 8, 1)).astype(np.float32), "w")
    )
    inputs = random.normal(0, 1, (4, 4, 16)).astype(np.float32)
    int8_program = program_of(onnx_model, inputs)
    exact = run_all(onnx_model, inputs, ["y"])["y"]
    simulated = simulate(int8_program, {"input": inputs}).tensors["y"]
    assert simulated.shape == exact.shape == (4, 5, 4)
    assert 10 * np.log10((exact**2).sum() / ((simulated - exact) ** 2).sum()) > 25


@pytest.mark.parametrize("axes", [1, 2])
def test_dilated_windows_that_reach_too_far_are_pooled_in_float(axes: int) -> None:
    """ONNX Runtime refuses padding as large as the window, which a dilated window with ceil_mode would need."""
    size, twos, pads = [13] * axes, [2] * axes, [0] * axes + [1] * axes
    given_as, made_as = ", ".join(map(str, size)), "p, q"[: 3 * axes - 2]
    onnx_model = graphs.proto(f"""g (float[N, 4, {given_as}] input) => (float[N, 4, {made_as}] y) {{
        [conv] a = Conv (input, w)
        [pool] y = MaxPool
            <ceil_mode = 1, kernel_shape = {twos}, strides = {twos}, dilations = {twos}, pads = {pads}> (a)
    }}""")
    random = np.random.default_rng(0)
    weights = random.normal(0, 0.4, (4, 4, *[1] * axes)).astype(np.float32)
    onnx_model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    inputs = random.normal(0, 1, (3, 4, *size)).astype(np.float32)
    int8_program = program_of(onnx_model, inputs)
    assert [step.sources[0] for step in int8_program.steps if isinstance(step, Float)] == ["pool"]
    exact = run_all(onnx_model, inputs, ["y"])["y"]
    assert np.abs(simulate(int8_program, {"input": inputs}).tensors["y"] - exact).max() < 0.1
