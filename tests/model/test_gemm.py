"""Test `edgeq.model.gemm`: the rewritten form can be quantized and computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import edgeq
from edgeq.model.prepare import prepare_model
from edgeq.run.session import open_session

ROWS, TAPS, OUTPUTS = 3, 4, 5


def _gemm(
    name: str, source: str, weight: str, output: str, bias: str = "", **attributes: float | int
) -> onnx.NodeProto:
    return helper.make_node("Gemm", [source, weight, *([bias] if bias else [])], [output], name=name, **attributes)


def _model(
    nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], outputs: list[str], columns: int = TAPS
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, columns])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _prepared(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Prepare a model, check that it computes the same, and return it."""
    source = folder / "source.onnx"
    source.write_bytes(model.SerializeToString())
    made = prepare_model(source, folder / "work")
    x = np.random.default_rng(0).normal(size=[d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim])
    feed = {"x": x.astype(np.float32)}
    for a, b in zip(open_session(source).run(None, feed), open_session(made.path).run(None, feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    return onnx.load(made.path)


@given(
    bias=st.sampled_from([None, (), (1,), (OUTPUTS,), (1, 1), (1, OUTPUTS), (ROWS, 1), (ROWS, OUTPUTS)]),
    alpha=st.sampled_from([1.0, 2.5]),
    beta=st.sampled_from([1.0, 0.5]),
    turned=st.booleans(),
    shared=st.booleans(),
)
@settings(max_examples=40)
def test_any_gemm(
    tmp_path_factory: pytest.TempPathFactory,
    bias: tuple[int, ...] | None,
    alpha: float,
    beta: float,
    turned: bool,
    shared: bool,
) -> None:
    random = np.random.default_rng(0)
    constants = {"w": random.normal(size=(OUTPUTS, TAPS) if turned else (TAPS, OUTPUTS))}
    if bias is not None:
        constants["b"] = random.normal(size=bias)
    node = _gemm("gemm", "x", "w", "y", "b" if bias is not None else "", alpha=alpha, beta=beta, transB=int(turned))
    nodes, outputs = [node, helper.make_node("Relu", ["y"], ["z"], name="relu")], ["z", "y"]
    if shared:
        nodes.append(_gemm("other", "x", "w", "o", "b" if bias is not None else "", transB=int(turned)))
        outputs.append("o")
    made = _prepared(_model(nodes, constants, outputs), tmp_path_factory.mktemp("gemm"))
    assert [output.name for output in made.graph.output] == outputs
    dims = {tensor.name: tuple(tensor.dims) for tensor in made.graph.initializer}
    gemms = [n for n in made.graph.node if n.op_type == "Gemm"]
    assert len(gemms) == 1 + shared
    for gemm in gemms:
        assert not {a.name for a in gemm.attribute} & {"alpha", "beta"} or all(
            a.f == 1 for a in gemm.attribute if a.name in ("alpha", "beta")
        )
        assert len(gemm.input) < 3 or dims[gemm.input[2]] == (OUTPUTS,)


def test_weights_read_both_ways_become_two(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(TAPS, TAPS)) * np.geomspace(0.01, 10, TAPS)
    nodes = [
        _gemm("first", "x", "w", "h"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        _gemm("second", "r", "w", "m", transB=1),
        helper.make_node("Relu", ["m"], ["q"], name="relu2"),
        _gemm("third", "q", "w", "y"),
    ]
    made = _prepared(_model(nodes, {"w": weight}, ["y"]), tmp_path)
    first, second, third = (n.input[1] for n in made.graph.node if n.op_type == "Gemm")
    assert first == third != second


@pytest.mark.parametrize("bias", [(), (1, OUTPUTS), (ROWS, 1)])
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_it_can_be_quantized(tmp_path: Path, bias: tuple[int, ...], form: str) -> None:
    random = np.random.default_rng(0)
    constants = {"w": random.normal(size=(TAPS, OUTPUTS)), "b": random.normal(size=bias)}
    path = tmp_path / "m.onnx"
    path.write_bytes(_model([_gemm("gemm", "x", "w", "y", "b", alpha=0.5)], constants, ["y"]).SerializeToString())
    data = [{"x": random.normal(size=(ROWS, TAPS)).astype(np.float32)} for _ in range(4)]
    found = edgeq.quantize(path, edgeq.Data(data), tmp_path / "q.onnx", overrides={"format": form}, timed=False)
    assert found.proof.agreement.sqnr_db > 25
    assert found.proof.coverage.int8_mac_share > 0.9
