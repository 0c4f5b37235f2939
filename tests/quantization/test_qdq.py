"""Test the Q/DQ writer against ONNX Runtime's quantizer, and the rule for clamps against brute force."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import numpy_helper

import edgeq
from edgeq.calibration.ranges import Range
from edgeq.model.quant_params import LIMITS
from edgeq.quantization.clamps import implies_clamp
from edgeq.quantization.params import activation_params, weight_params
from edgeq.scheme import Scheme
from tests.backends.build import Bench, bench, mixed, random, residual
from tests.graphs import proto

FLOATS = st.floats(-1e6, 1e6, width=32)
TYPES = st.sampled_from([ir.DataType.INT8, ir.DataType.UINT8])


def shared() -> onnx.ModelProto:
    """Return a model with a weight and a bias that two layers share, a tensor that two nodes read, an output that other
    nodes read, and a Softmax.
    """
    body = """
    g (float[1,8,8,8] x) => (float[1,8,8,8] a, float[1,16] y) {
      [c1] c1 = Conv <pads = [1,1,1,1]> (x, w, b)
      [r1] r1 = Relu (c1)
      [c2] c2 = Conv <pads = [1,1,1,1]> (r1, w, b)
      [l2] l2 = Clip (c2, low, high)
      [a] a = Add (l2, r1)
      [t] t = Transpose <perm = [0, 1, 3, 2]> (a)
      [m] m = Concat <axis = 1> (t, r1)
      [p] p = GlobalAveragePool (m)
      [f] f = Flatten (p)
      [d] d = MatMul (f, v)
      [y] y = Softmax (d)
    }"""
    model, source = proto(body), np.random.default_rng(0)
    values = {
        "w": source.normal(size=(8, 8, 3, 3)), "b": source.normal(size=8) * 5, "v": source.normal(size=(16, 16)),
        "low": np.array(0.0), "high": np.array(6.0),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), k) for k, v in values.items())
    return model


def theirs(net: Bench, scheme: Scheme, file: Path) -> Path:
    """Write what ONNX Runtime's quantizer makes with the same scheme and ranges."""
    from onnxruntime.quantization import CalibrationMethod, QuantType, TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    types = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8}
    ranges = {
        name: TensorData(lowest=np.float32(span.low), highest=np.float32(span.high))
        for name, span in net.ranges(scheme).items()
    }
    model = onnx.shape_inference.infer_shapes(onnx.load(net.prepared.path))
    model.metadata_props.add(key="onnx.infer", value="onnxruntime.quant")
    every = sorted({node.op_type for node in model.graph.node})
    writer = QDQQuantizer(
        model,
        scheme.per_channel,
        scheme.reduce_range,
        types[scheme.weight_type],
        types[scheme.activation_type],
        TensorsData(CalibrationMethod.MinMax, ranges),
        [],
        [],
        every,
        {"ActivationSymmetric": scheme.activation_symmetric, "WeightSymmetric": scheme.weight_symmetric},
    )
    onnx.save(writer.quantize_model(), file)
    return file


def optimised(file: Path) -> Counter[str]:
    """Count the operator types after ONNX Runtime's extended optimisation."""
    options, saved = onnxruntime.SessionOptions(), file.with_suffix(".optimised")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(saved)
    onnxruntime.InferenceSession(file, options)
    return Counter(node.op_type for node in onnx.load(saved).graph.node)


@pytest.mark.usefixtures("only_exact_kernels")
@pytest.mark.parametrize("make", [residual, shared, mixed])
@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"activation_type": "int8"},
        {"activation_type": "int8", "activation_symmetric": True},
        {"per_channel": False, "reduce_range": True},
        {"weight_type": "uint8", "weight_symmetric": False, "per_channel": False},
    ],
)
def test_it_is_as_good_as_onnxruntimes_quantizer(tmp_path: Path, make: Any, choice: dict[str, Any]) -> None:
    net, scheme = bench(tmp_path, make()), Scheme(**choice)
    artifact = net.build(**choice)
    other = replace(artifact, model=theirs(net, scheme, tmp_path / "theirs.onnx"))
    assert optimised(artifact.model) == optimised(other.model)
    assert net.sqnr(artifact) > net.sqnr(other) - 0.5


@given(low=FLOATS, high=FLOATS, dtype=TYPES, symmetric=st.booleans())
def test_activation_parameters_are_onnxruntimes(low: float, high: float, dtype: ir.DataType, symmetric: bool) -> None:
    from onnxruntime.quantization.quant_utils import compute_scale_zp, get_qmin_qmax_for_qType

    low, high = min(low, high), max(low, high)
    params = activation_params(Range(min(low, 0.0), max(high, 0.0)), dtype, symmetric=symmetric)
    limits = get_qmin_qmax_for_qType(int(dtype), symmetric=symmetric)
    zero, scale = compute_scale_zp(np.float32(low), np.float32(high), *limits, symmetric)
    assert params.scale == scale
    if min(low, 0) < max(high, 0) and float(scale) != 1:
        assert params.zero_point == zero


@given(
    weight=arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=FLOATS),
    dtype=st.sampled_from(["int8", "uint8"]),
    symmetric=st.booleans(),
    reduced=st.booleans(),
    axis=st.sampled_from([None, 0, 1]),
)
def test_weight_parameters_are_onnxruntimes(
    weight: np.ndarray, dtype: Any, symmetric: bool, reduced: bool, axis: int | None
) -> None:
    from onnxruntime.quantization.quant_utils import compute_data_quant_params

    scheme = Scheme(weight_type=dtype, weight_symmetric=symmetric, reduce_range=reduced)
    params = weight_params(weight, axis, scheme)
    rows = [weight.ravel()] if axis is None else list(np.moveaxis(weight, axis, 0))
    onnx_type = onnx.TensorProto.INT8 if dtype == "int8" else onnx.TensorProto.UINT8
    right = [compute_data_quant_params(row.ravel(), onnx_type, symmetric or axis is not None, reduced) for row in rows]
    np.testing.assert_array_equal(params.scale.ravel(), np.array([scale for _, scale in right]))
    for zero, (expected, scale) in zip(params.zero_point.ravel(), right, strict=True):
        assert zero == expected or scale == 1  # onnxruntime's zero point of an empty range is 0


@given(
    low=st.floats(-10, 0), high=st.floats(0, 10), dtype=TYPES, symmetric=st.booleans(),
    bounds=st.sampled_from([(0.0, np.inf), (0.0, 6.0), (-np.inf, 1.0), (-1.0, 1.0)]),
)  # fmt: skip
def test_a_clamp_is_implied_where_no_number_becomes_another_integer(
    low: float, high: float, dtype: ir.DataType, symmetric: bool, bounds: tuple[float, float]
) -> None:
    params = activation_params(Range(low, high), dtype, symmetric=symmetric)
    lowest, highest = LIMITS[dtype]
    steps = np.arange(-2 * (highest - lowest), 2 * (highest - lowest) + 1) * float(params.scale)
    numbers = np.concatenate([steps, [-1e30, 1e30]]).astype(np.float32)
    is_equal = np.array_equal(params.quantize(numbers), params.quantize(np.clip(numbers, *bounds)))
    assert implies_clamp(params, *bounds) == is_equal


def branched(act: str, where: str, alone: bool) -> onnx.ModelProto:
    """Return a clamp whose result a body of control flow reads, alone or together with a convolution."""
    body = {
        "If": "z = If (flag) <then_branch = t () => (float[1,8,8,8] p) { p = Identity (y) }, "
        "else_branch = e () => (float[1,8,8,8] q) { q = Neg (y) }>",
        "Loop": "z = Loop (two, yes, zeros) <body = b (int64 i, bool go, float[1,8,8,8] s) => "
        "(bool on, float[1,8,8,8] so) { on = Identity (go) so = Add (s, y) }>",
    }[where]
    clamp = {"Relu": "y = Relu (c)", "Clip": "y = Clip (c, zero, one)"}[act]
    join = "r = Identity (z)" if alone else "d = Conv <pads = [1,1,1,1]> (y, v) r = Add (z, d)"
    return proto(
        f"""g (float[1,8,8,8] x) => (float[1,8,8,8] o)
        <float zero = {{0}}, float one = {{1}}, int64 two = {{2}}, bool yes = {{1}}, float half = {{0}}> {{
            c = Conv <pads = [1,1,1,1]> (x, w)
            {clamp}
            mean = ReduceMean <keepdims = 0> (x)
            flag = Greater (mean, half)
            {body}
            {join}
            o = Conv <pads = [1,1,1,1]> (r, u)
        }}""",
        {
            "w": random(8, 8, 3, 3) / 8,
            "v": random(8, 8, 3, 3, seed=1) / 8,
            "u": random(8, 8, 3, 3, seed=2) / 8,
            "zeros": np.zeros((1, 8, 8, 8), np.float32),
        },
        opset=17,
    )


@pytest.mark.usefixtures("only_exact_kernels")
@pytest.mark.parametrize("act", ["Relu", "Clip"])
@pytest.mark.parametrize("where", ["If", "Loop"])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("format", ["QDQ", "QOperator"])
def test_a_body_reads_what_a_clamp_gives(tmp_path: Path, act: str, where: str, alone: bool, format: Any) -> None:
    net = bench(tmp_path, branched(act, where, alone))
    assert net.sqnr(net.build(format=format)) > 28


@pytest.mark.usefixtures("only_exact_kernels")
@pytest.mark.parametrize("activation_type", ["uint8", "int8"])
@pytest.mark.parametrize("act", ["Relu", "Clip"])
def test_a_clamp_that_lets_nothing_through(tmp_path: Path, activation_type: Any, act: str) -> None:
    clamp, bias = {"Relu": ("r = Relu (c)", -100.0), "Clip": ("r = Clip (c, zero, six)", 100.0)}[act]
    body = f"""g (float[1,8,8,8] x) => (float[1,8,8,8] y) <float zero = {{0}}, float six = {{6}}> {{
        c = Conv <pads = [1,1,1,1]> (x, w, b)
        {clamp}
        d = Conv <pads = [1,1,1,1]> (x, v)
        y = Add (r, d)
    }}"""
    weights = {"w": random(8, 8, 3, 3), "v": random(8, 8, 3, 3, seed=1), "b": np.full(8, bias, np.float32)}
    net = bench(tmp_path, proto(body, weights, opset=17))
    assert net.sqnr(net.build(activation_type=activation_type)) > 30


@pytest.mark.usefixtures("only_exact_kernels")
@pytest.mark.parametrize("format", ["QDQ", "QOperator"])
@pytest.mark.parametrize("tokens", [16, 512])
def test_a_softmax_over_many_keeps_telling_them_apart(tmp_path: Path, tokens: int, format: Any) -> None:
    body = f"""g (float[1,{tokens},16] x) => (float[1,{tokens},16] y) {{
        q = MatMul (x, w)
        k = Transpose <perm = [0, 2, 1]> (x)
        s = MatMul (q, k)
        p = Softmax <axis = -1> (s)
        y = MatMul (p, x)
    }}"""
    model = proto(body, {"w": np.eye(16, dtype=np.float32) / 16}, opset=17)
    net = bench(tmp_path, model, random(4, tokens, 16))
    assert net.sqnr(net.build(format=format)) > 28


def test_a_float_node_reads_what_a_float_node_made(tmp_path: Path) -> None:
    """A float node reads another float node's tensor directly, without the Q/DQ pair that a quantized reader needs."""
    body = """g (float[1,8,8,8] x) => (float[1,8,8,8] y, float[1,8,8,8] z) {
        t = Tanh (x)
        y = Conv <pads = [1,1,1,1]> (t, w)
        z = Sin (t)
    }"""
    net = bench(tmp_path, proto(body, {"w": random(8, 8, 3, 3)}, opset=17))
    artifact = net.build()
    x = {"x": random(1, 8, 8, 8)}
    (expected,) = onnxruntime.InferenceSession(net.prepared.path).run(["z"], x)
    (answer,) = onnxruntime.InferenceSession(artifact.model).run(["z"], x)
    np.testing.assert_allclose(answer, expected, atol=1e-6)


def test_threads_leave_onnxruntime_alone(tmp_path: Path) -> None:
    names = ("base_quantizer", "calibrate", "onnx_model", "qdq_quantizer", "quant_utils", "quantize")
    modules = [import_module(f"onnxruntime.quantization.{name}") for name in names]

    def contents(module: ModuleType) -> dict[str, int]:
        return {name: id(value) for name, value in vars(module).items()}

    onnx.save(residual(), tmp_path / "model.onnx")
    samples = [{"x": random(1, 8, 8, 8, seed=seed)} for seed in range(4)]
    contents_at_start, changes, stop = [contents(module) for module in modules], [], threading.Event()

    def quantize(place: int) -> None:
        edgeq.quantize(tmp_path / "model.onnx", samples, tmp_path / f"{place}.onnx", timed=False, emulate=False)

    def watch() -> None:
        while not stop.is_set():
            changes.extend(
                module.__name__
                for module, was in zip(modules, contents_at_start, strict=True)
                if contents(module) != was
            )

    watcher = threading.Thread(target=watch)
    threads = [threading.Thread(target=quantize, args=(place,)) for place in range(4)]
    watcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    assert not changes
    assert len(list(tmp_path.glob("?.onnx"))) == 4
