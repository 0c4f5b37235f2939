"""`edgeq.tune.recover.expand`: written out, integer operators give what they gave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import helper, numpy_helper

from edgeq.data.samples import Sample
from edgeq.errors import ModelError
from edgeq.tune.recover.expand import PLAIN, expanded
from edgeq.tune.recover.run import Recoverer
from tests.tune.recover.graphs import nets
from tests.tune.recover.nets import SCHEME, FewSamples, Net, few, job_of, run, target


def _written_out(model: onnx.ModelProto) -> onnx.ModelProto:
    nodes, extra = expanded(model)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    made.graph.initializer.extend(extra)
    return made


def _same(path: Path, feed: dict[str, np.ndarray]) -> set[str]:
    model = onnx.load(path)
    plain = _written_out(model)
    assert not {n.op_type for n in plain.graph.node} & {"QLinearConv", "QLinearMatMul", "QGemm"}
    for a, b in zip(run(model, feed, optimization="none"), run(plain, feed, optimization="none"), strict=True):
        # Sums in integers and in floats may fall on different sides of a half.
        step = np.abs(a).max() / 100
        assert np.mean(np.abs(a - b) > 1e-5 + 1e-6 * step) < 0.03
        np.testing.assert_allclose(a, b, atol=4 * step)
    return {n.op_type for n in model.graph.node}


@given(drawn=nets(chain=("layer", "layer")))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_networks(tmp_path_factory: pytest.TempPathFactory, drawn: tuple) -> None:
    model, feed = drawn
    folder = tmp_path_factory.mktemp("expand")
    job = job_of(model, folder, FewSamples((Sample("s", feed),)), prepare=True)
    scheme = SCHEME.replace(format="QOperator")
    try:
        state = Recoverer(job, target(), folder).state(scheme, [], folder / "q.onnx")
    except ModelError:
        return  # nothing in it could be quantized
    assert state.artifact is not None
    _same(state.artifact.model, feed)


@pytest.mark.parametrize("per_channel", [False, True])
def test_all_three_forms(tmp_path: Path, per_channel: bool) -> None:
    net = Net()
    net.conv("x", "c", 3, 4, 3, channels=[0.1, 1.0, 5.0, 20.0])
    net.node("GlobalAveragePool", ["c_out"], "p")
    net.node("Flatten", ["p"], "f")
    weight = net.random.normal(size=(6, 4)) * np.array([[0.1], [1], [2], [10], [0.3], [1]])
    net.node("Gemm", ["f", net.constant("w", weight), net.constant("b", np.ones(6))], "g", transB=1)
    net.node("Gemm", ["g", net.constant("v", weight)], "h")
    net.node("MatMul", ["h", net.constant("m", weight.T)], "y")
    model = net.model({"x": [1, 3, 6, 6]}, ["y"])
    samples = few(4, [1, 3, 6, 6])
    state = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path).state(
        SCHEME.replace(format="QOperator", per_channel=per_channel), [], tmp_path / "q.onnx"
    )
    assert state.artifact is not None
    found = _same(state.artifact.model, dict(samples.samples[0].inputs))
    assert found >= {"QLinearConv", "QGemm", "QLinearMatMul"}


def test_batched_weights_have_their_channels_last() -> None:
    scales = np.array([0.1, 0.2, 0.4], np.float32)
    constants = {
        "xs": np.float32(0.1), "xz": np.uint8(3), "w": np.arange(24, dtype=np.int8).reshape(2, 4, 3), "ws": scales,
        "wz": np.zeros(3, np.int8), "ys": np.float32(0.5), "yz": np.uint8(10),
    }  # fmt: skip
    node = helper.make_node("QLinearMatMul", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"], name="m")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [2, 5, 4])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.UINT8, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.random.default_rng(0).integers(0, 9, (2, 5, 4)).astype(np.uint8)
    made = _written_out(model)
    (value,) = run(made, {"x": x}, optimization="none")
    exact = ((x.astype(np.float64) - 3) * 0.1) @ (constants["w"] * scales.astype(np.float64))
    wanted = np.clip(np.rint(exact / 0.5) + 10, 0, 255)
    assert np.abs(value - wanted).max() <= 1
    assert made.graph.node[-1].input[0] == "y" + PLAIN


def test_bias_counts_in_the_unit_of_a_scaled_product() -> None:
    """QGemm with alpha: ONNX Runtime adds the bias before it scales."""
    constants = {
        "as": np.float32(0.1), "az": np.uint8(0), "b": np.eye(2, dtype=np.int8), "bs": np.float32(0.5),
        "bz": np.int8(0), "c": np.array([100, -50], np.int32),
    }  # fmt: skip
    node = helper.make_node("QGemm", ["a", "as", "az", "b", "bs", "bz", "c"], ["y"], domain="com.microsoft", alpha=2.0)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("a", onnx.TensorProto.UINT8, [1, 2])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    feed = {"a": np.array([[10, 20]], np.uint8)}
    (wanted,) = run(model, feed)
    np.testing.assert_allclose(run(_written_out(model), feed)[0], wanted, rtol=1e-6)
