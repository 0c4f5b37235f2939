"""Test the twin against the same arithmetic in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from edgeq.backends.tensorrt.simulate import SETTINGS, simulation
from edgeq.model.convert import from_proto, to_proto
from edgeq.run.session import SessionSettings, open_session

from .nets import CHANNELS, bench, model, random, residual


def half_chain() -> onnx.ModelProto:
    """Return x → float16 → times 1000 → times 0.001 → float32, which is infinite for x from 66 on."""
    nodes = """
        [down] h = Cast<to = 10>(x)
        [up] m = Mul(h, k)
        [back] n = Mul(m, r)
        [out] y = Cast<to = 1>(n)
    """
    return model(nodes, {"k": np.float16(1000), "r": np.float16(0.001)}, shape=[4], opset=19)


def test_onnxruntimes_cpu_kernels_do_not_compute_in_float16() -> None:
    """The twin exists because ONNX Runtime's CPU kernels do not compute in float16. If this test fails, the graph can
    be run.
    """
    x = np.array([1.2345, 200, 0, 0], np.float32)
    assert open_session(half_chain().SerializeToString()).run(None, {"x": x})[0][1] == pytest.approx(200, rel=1e-3)


@pytest.mark.parametrize("level", ["none", "basic", "all"])
def test_the_twin_rounds_and_overflows_like_float16(level: str) -> None:
    x = np.array([1.2345, 200, 65.5, -66], np.float32)
    twin = to_proto(simulation(from_proto(half_chain())))
    got = open_session(twin.SerializeToString(), SessionSettings(optimization=level)).run(None, {"x": x})[0]  # type: ignore[arg-type]
    with np.errstate(over="ignore"):
        expected = ((x.astype(np.float16) * np.float16(1000)) * np.float16(0.001)).astype(np.float32)
    np.testing.assert_array_equal(got, expected)


def test_int8_arithmetic_is_that_of_the_graph(tmp_path: Path) -> None:
    proto = model(
        "[conv] y = Conv(x, w, b)",
        {"w": random(CHANNELS, CHANNELS, 1, 1), "b": random(CHANNELS)},
        shape=(1, CHANNELS, 1, 1),
    )
    built = bench(tmp_path, proto).build()
    constants = {t.name: numpy_helper.to_array(t) for t in onnx.load(built.model).graph.initializer}
    x = random(1, CHANNELS, 1, 1, seed=9)
    step = float(next(v for k, v in constants.items() if k.startswith("x_scale")))
    q = np.clip(np.rint(x.ravel() / np.float32(step)), -128, 127).astype(np.int64)
    sums = constants["w_quantized"].reshape(CHANNELS, CHANNELS).astype(np.int64) @ q
    scales = next(v for k, v in constants.items() if k.startswith("w_scale")).astype(np.float64)
    exact = sums * step * scales + constants["b_float16"].astype(np.float64)
    got = open_session(built.simulation, SETTINGS).run(None, {"x": x})[0].ravel()
    # The kernel sums in float32 and rounds to float16: at most half a step of float16, and the error of float32.
    np.testing.assert_allclose(got, exact, rtol=2**-11 + 1e-5, atol=1e-6)


def test_names_and_signature_are_the_same(tmp_path: Path) -> None:
    built = bench(tmp_path, residual()).build()
    deployed, twin = onnx.load(built.model).graph, onnx.load(built.simulation).graph
    assert [i.name for i in deployed.input] == [i.name for i in twin.input]
    assert [o.name for o in deployed.output] == [o.name for o in twin.output]
    assert {n.name for n in deployed.node if n.op_type != "Cast"} <= {n.name for n in twin.node}


def test_the_deployed_file_loads_and_is_close_to_its_twin(tmp_path: Path) -> None:
    """ONNX Runtime runs the deployed file in float32. It differs from the twin only by float16 rounding, and by
    integers that this rounding changes.
    """
    small = bench(tmp_path, residual())
    built = small.build()
    x = dict(next(iter(small.samples)).inputs)
    exact = open_session(small.prepared.path).run(None, x)[0]
    deployed = open_session(built.model, SETTINGS).run(None, x)[0]
    twin = open_session(built.simulation, SETTINGS).run(None, x)[0]
    assert np.linalg.norm(deployed - twin) < 0.02 * np.linalg.norm(twin)
    assert np.linalg.norm(twin - exact) < 0.1 * np.linalg.norm(exact)


def test_a_cast_to_float_becomes_nothing() -> None:
    nodes = """
        [down] h = Cast<to = 10>(x)
        [up] y = Cast<to = 1>(h)
    """
    twin = to_proto(simulation(from_proto(model(nodes, {}, shape=[2], opset=19))))
    assert [n.op_type for n in twin.graph.node] == ["Cast", "Cast", "Identity"]
    x = np.array([0.1, 1e9], np.float32)
    got = open_session(twin.SerializeToString(), SETTINGS).run(None, {"x": x})[0]
    assert got.tolist() == [np.float32(np.float16(0.1)), np.inf]


def test_inputs_and_outputs_in_16_bits_keep_their_types() -> None:
    nodes = """
        [widened] wide = Cast<to = 1>(x)
        [down] h = Cast<to = 10>(wide)
        [times] m = Mul(h, k)
        [up] n = Cast<to = 1>(m)
        [narrowed] y = Cast<to = 10>(n)
    """
    proto = model(nodes, {"k": np.float16(1.001)}, shape=[3], opset=19)
    for border in (*proto.graph.input, *proto.graph.output):
        border.type.tensor_type.elem_type = TensorProto.FLOAT16
    twin = to_proto(simulation(from_proto(proto)))
    x = np.array([0.1, 3, -7], np.float16)
    got = open_session(twin.SerializeToString(), SETTINGS).run(None, {"x": x})[0]
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, x * np.float16(1.001))


def test_padding_is_only_moved(tmp_path: Path) -> None:
    nodes = """
        [conv] c = Conv<pads = [1, 1, 1, 1]>(x, w)
        [pad] y = Pad(c, pads)
    """
    weights = {"w": random(CHANNELS, CHANNELS, 3, 3), "pads": np.array([0, 0, 0, 0, 0, 2, 0, 0], np.int64)}
    built = bench(tmp_path, model(nodes, weights)).build()
    graph = onnx.load(built.simulation).graph
    assert not any(n.name.startswith("pad_") for n in graph.node)
