"""Test the fitting to samples. It is kept only if it helps on other samples. Weights that read only zeros take no bits
from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeq.backends.systolic.compile import compile_program
from edgeq.backends.systolic.program import ArrayConfig, Program
from edgeq.backends.systolic.simulate import simulate
from edgeq.backends.systolic.to_onnx import host_reference_model
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.data.samples import open_samples
from edgeq.model.edit import to_bytes
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.run.session import open_session
from tests.backends.systolic.graphs import GraphBuilder, random_graph
from tests.backends.systolic.test_backend import SCHEME

Feeds = Sequence[dict[str, np.ndarray]]


def compiled(model: onnx.ModelProto, feeds: Feeds, folder: Path, *, fitted: bool) -> tuple[Program, PreparedModel]:
    onnx.save(model, folder / "m.onnx")
    prepared = prepare_model(folder / "m.onnx", folder)
    samples = open_samples(list(feeds), prepared.signature)
    statistics = collect(prepared.model, samples, model_digest=prepared.digest)
    ranges = derive_ranges(statistics, "minmax", activation_type="int8", symmetric=True)
    return compile_program(prepared, ranges, SCHEME, ArrayConfig(), samples if fitted else None), prepared


def sqnr_db(program: Program, prepared: PreparedModel, feeds: Feeds) -> float:
    session = open_session(prepared.path)
    signal = noise = 0.0
    for feed in feeds:
        found = simulate(program, {name: np.atleast_1d(value) for name, value in feed.items()}).tensors
        for name, exact in zip(program.outputs, session.run(list(program.outputs), feed), strict=True):
            signal, noise = signal + np.square(exact).sum(), noise + np.square(exact - found[name]).sum()
    return float(10 * np.log10(signal / noise))


def multiply(constant: TensorProto, factors: np.ndarray) -> None:
    """Multiply a constant in place."""
    constant.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(constant) * factors, constant.name))


def images(b: GraphBuilder, count: int) -> list[dict[str, np.ndarray]]:
    """Return samples in which neighbouring pixels are alike."""
    noise = b.rng.standard_normal((count, *b.input_shape[1:]))
    return [{"input": (0.1 * x + x.mean(axis=(1, 2), keepdims=True) * 6)[None].astype(np.float32)} for x in noise]


def test_fitting_helps_on_other_samples(tmp_path: Path) -> None:
    b = GraphBuilder(np.random.default_rng(3), input_shape=(1, 3, 12, 12))
    y = b.conv(b.node("Relu", [b.conv("input", 8)], (1, 8, 12, 12)), 8)
    # One tile of channels whose weights differ a hundredfold but matter equally.
    sizes = np.exp2(-np.arange(8.0)).astype(np.float32)
    multiply(b.constants[0], sizes[:, None, None, None])
    multiply(b.constants[1], sizes)
    multiply(b.constants[2], 1 / sizes[:, None, None])
    model, feeds, others = b.model(y), images(b, 24), images(b, 24)
    plain, fitted = (compiled(model, feeds, tmp_path, fitted=fitted) for fitted in (False, True))
    assert sqnr_db(*fitted, others) > sqnr_db(*plain, others) + 2


def test_a_correction_that_does_harm_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeq.backends.systolic.compile._shift", lambda y, *rest, **more: np.full(len(y), 0.5))
    b = GraphBuilder(np.random.default_rng(4), input_shape=(1, 3, 8, 8))
    model, feeds = b.model(b.conv("input", 4)), [{"input": x[None]} for x in b.samples(12)]
    (plain, prepared), (fitted, _) = (compiled(model, feeds, tmp_path, fitted=fitted) for fitted in (False, True))
    assert sqnr_db(fitted, prepared, feeds) >= sqnr_db(plain, prepared, feeds)


@pytest.mark.parametrize("seed", range(6))
def test_no_fitting_does_harm_on_random_networks(seed: int, tmp_path: Path) -> None:
    model, some = random_graph(seed)
    random = np.random.default_rng(seed)
    feeds = [{"input": random.standard_normal((1, *some.shape[1:])).astype(np.float32)} for _ in range(36)]
    (plain, prepared), (fitted, _) = (compiled(model, feeds, tmp_path, fitted=fitted) for fitted in (False, True))
    others = [{"input": random.standard_normal((1, *some.shape[1:])).astype(np.float32)} for _ in range(24)]
    assert sqnr_db(fitted, prepared, others) > sqnr_db(plain, prepared, others) - 0.5


def test_channels_of_zeros_take_no_bits_from_others(tmp_path: Path) -> None:
    b = GraphBuilder(np.random.default_rng(1), input_shape=(1, 3, 12, 12))
    x = b.node("Relu", [b.conv("input", 16)], (1, 16, 12, 12))
    y = b.conv(b.node("Relu", [b.conv(x, 16, groups=16)], (1, 16, 12, 12)), 8)
    weights, bias, loud = b.constants[:3]
    arrays = [numpy_helper.to_array(t).copy() for t in (weights, bias, loud)]
    arrays[0][5], arrays[1][5], arrays[2][5] = 1e-9, -0.3, 4000
    for tensor, array in zip((weights, bias, loud), arrays, strict=True):
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    feeds = [{"input": x[None]} for x in b.samples(12)]
    program, prepared = compiled(b.model(y), feeds, tmp_path, fitted=False)
    assert sqnr_db(program, prepared, feeds) > 20


@pytest.mark.parametrize("kind", ["bool", "int64", "float32"])
def test_inputs_without_axes(kind: str, tmp_path: Path) -> None:
    b = GraphBuilder(np.random.default_rng(2))
    x = b.conv("input", 8)
    if kind == "bool":
        x = b.node("Where", ["flag", x, b.node("Neg", [x], b.shapes[x])], b.shapes[x])
    else:
        x = b.node("Mul", [x, b.node("Cast", ["flag"], (), to=TensorProto.FLOAT)], b.shapes[x])
    y = b.conv(x, 4)
    inputs = [
        helper.make_tensor_value_info("input", TensorProto.FLOAT, list(b.input_shape)),
        helper.make_tensor_value_info("flag", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), []),
    ]
    outputs = [helper.make_tensor_value_info(y, TensorProto.FLOAT, list(b.shapes[y]))]
    graph = helper.make_graph(b.nodes, "flagged", inputs, outputs, b.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    values = b.rng.integers(0, 2, 9)
    feeds = [{"input": x[None], "flag": np.array(v, kind)} for x, v in zip(b.samples(9), values, strict=True)]
    program, prepared = compiled(model, feeds, tmp_path, fitted=True)
    assert sqnr_db(program, prepared, feeds) > 25
    twin = open_session(to_bytes(host_reference_model(program, prepared.signature)))
    stacked = {name: np.concatenate([np.atleast_1d(feed[name]) for feed in feeds]) for name in feeds[0]}
    together = simulate(program, stacked)
    one_by_one = [twin.run(list(program.outputs), feed)[0] for feed in feeds]
    np.testing.assert_array_equal(together.tensors[program.outputs[0]], np.concatenate(one_by_one))


def test_nonnegative_tensors_use_all_integers(tmp_path: Path) -> None:
    b = GraphBuilder(np.random.default_rng(5))
    x = b.node("Relu", [b.conv("input", 8)], (1, 8, 9, 9))
    six = b.node("Clip", [b.conv(x, 8), b.constant(0.0), b.constant(0.5)], (1, 8, 9, 9))
    pointwise = b.node("Relu", [b.conv(six, 8, (1, 1), pads=(0, 0, 0, 0))], (1, 8, 9, 9))
    wide = b.conv(pointwise, 4, pads=(0, 0, 0, 0))
    feeds = [{"input": x[None]} for x in b.samples(12)]
    program, prepared = compiled(b.model(wide), feeds, tmp_path, fitted=False)
    kept = simulate(program, {"input": np.concatenate([feed["input"] for feed in feeds])}, keep="*").tensors
    stored = {tensor.origin: kept[name] for name, tensor in program.tensors.items() if tensor.scale is not None}
    # A layer with padding reads zeros as 0. The others read the zeros of the relu as -128.
    assert stored[x].min() == 0
    for name in (six, pointwise):
        assert (stored[f"{name}/offset"].min(), stored[f"{name}/offset"].max()) == (-128, 127)
    assert sqnr_db(program, prepared, feeds) > 35


@pytest.mark.parametrize("value", [np.arange(3, dtype=np.float32), np.arange(3), np.array(["a", "b"], object)])
def test_outputs_that_are_constants(value: np.ndarray, tmp_path: Path) -> None:
    b = GraphBuilder(np.random.default_rng(6))
    y = b.conv("input", 4)
    model, feeds = b.model(y), [{"input": x[None]} for x in b.samples(4)]
    kept = numpy_helper.from_array(value, "kept")
    model.graph.initializer.append(kept)
    model.graph.output.append(helper.make_tensor_value_info("kept", kept.data_type, list(value.shape)))
    program, prepared = compiled(model, feeds, tmp_path, fitted=False)
    assert program.outputs == (y, "kept")
    (found,) = open_session(to_bytes(host_reference_model(program, prepared.signature))).run(["kept"], feeds[0])
    assert list(found) == list(value)
