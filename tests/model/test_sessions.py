from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgeq.errors import RuntimeUnavailableError
from edgeq.model.convert import to_bytes
from edgeq.model.graph import GraphIndex, name_of
from edgeq.model.load import read_model, save_model
from edgeq.model.sessions import Loadable, open_in_memory
from edgeq.model.sharing import share_model, shared_model
from edgeq.run.session import SessionSettings, open_session
from tests.graphs import model

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "large": RANDOM.normal(size=(64, 64)).astype(np.float32),
    "half": RANDOM.normal(size=(64, 64)).astype(np.float16),
    "small": RANDOM.normal(size=(64,)).astype(np.float32),
    "shape": np.array([-1, 64], np.int64),
    "indices": np.arange(1024) % 64,
}


def graph() -> ir.Model:
    found = model(
        """g (float[N, 8, 8] x, float large, float16 half, float small, int64 shape, int64 indices)
            => (float[N, 1024] y) {
            flat = Reshape (x, shape)
            a = MatMul (flat, large)
            single = Cast <to = 1> (half)
            b = MatMul (a, single)
            c = Add (b, small)
            y = Gather <axis = 1> (c, indices)
        }"""
    )
    for value in found.graph.inputs[1:]:
        value.const_value = ir.tensor(WEIGHTS[name_of(value)], name=value.name)
        found.graph.register_initializer(value)
    del found.graph.inputs[1:]
    return found


def answers(session: object) -> np.ndarray:
    x = np.random.default_rng(1).normal(size=(3, 8, 8)).astype(np.float32)
    return session.run(None, {"x": x})[0]  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("optimization", ["none", "all"])
def test_it_answers_as_its_file_does(optimization: str) -> None:
    settings = SessionSettings(optimization=optimization, intra_op_threads=1)  # type: ignore[arg-type]
    right = answers(open_session(to_bytes(graph()), settings))
    np.testing.assert_array_equal(answers(open_in_memory(graph(), settings)), right)


def test_weights_in_another_order_of_memory() -> None:
    turned = graph()
    turned.graph.initializers["large"].const_value = ir.tensor(np.asfortranarray(WEIGHTS["large"]), name="large")
    np.testing.assert_array_equal(answers(open_in_memory(turned)), answers(open_in_memory(graph())))


def test_the_model_is_not_changed() -> None:
    mine = graph()
    before = to_bytes(mine)
    open_in_memory(mine)
    assert to_bytes(mine) == before


def test_weights_outlive_the_model() -> None:
    right = answers(open_session(to_bytes(graph())))
    session = open_in_memory(graph())  # only the session refers to these weights
    np.testing.assert_array_equal(answers(session), right)


def test_external_data_is_found_where_it_is(tmp_path: Path) -> None:
    save_model(graph(), tmp_path / "m.onnx", inline_limit=0)
    external = read_model(tmp_path / "m.onnx")
    kept = external.graph.initializers["large"].const_value
    external.graph.initializers["half"].const_value = ir.tensor(WEIGHTS["half"], name="half")
    np.testing.assert_array_equal(answers(open_in_memory(external)), answers(open_session(tmp_path / "m.onnx")))
    assert isinstance(kept, ir.ExternalTensor)
    assert external.graph.initializers["large"].const_value is kept


def test_the_optimised_graph_holds_the_weights(tmp_path: Path) -> None:
    written = tmp_path / "optimised.onnx"
    open_in_memory(graph(), SessionSettings(optimization="basic", save_optimized_to=written))
    sizes = {len(tensor.raw_data) for tensor in onnx.load(written).graph.initializer}
    assert WEIGHTS["large"].nbytes in sizes


def test_a_model_that_onnxruntime_refuses() -> None:
    broken = graph()
    broken.graph.initializers["large"].const_value = ir.tensor(WEIGHTS["large"][:50], name="large")
    with pytest.raises(RuntimeUnavailableError, match="refuses the model"):
        open_in_memory(broken)


def test_a_protobuf_answers_as_the_model_does(tmp_path: Path) -> None:
    save_model(graph(), tmp_path / "m.onnx")
    session = Loadable.of(GraphIndex(graph(), tmp_path / "m.onnx")).open()
    gc.collect()
    np.testing.assert_array_equal(answers(session), answers(open_in_memory(graph())))


def test_an_index_makes_what_sessions_open_once() -> None:
    known = GraphIndex(graph())
    assert Loadable.of(known) is Loadable.of(known)
    assert Loadable.of(Loadable.of(known)) is Loadable.of(known)


def test_more_outputs_stand_behind_those_of_the_model() -> None:
    session = Loadable.of(graph()).with_outputs(["b", "y", "b"]).open()
    assert [output.name for output in session.get_outputs()] == ["y", "b"]


def test_a_part_has_what_it_needs_alone() -> None:
    part = Loadable.of(graph()).only(["a"])
    assert [node.op_type for node in part.proto.graph.node] == ["Reshape", "MatMul"]
    assert set(part.weights) == {"large"}
    whole = Loadable.of(graph()).with_outputs(["a"]).open(SessionSettings(optimization="none"))
    x = np.ones((1, 8, 8), np.float32)
    np.testing.assert_array_equal(part.open().run(["a"], {"x": x})[0], whole.run(["a"], {"x": x})[0])


def test_a_part_has_what_a_body_in_it_captures() -> None:
    net = model(
        """g (float[2] x, float[2] unused, bool c) => (float[2] y, float[2] z) {
            a = Neg (x)
            y = If (c) <then_branch = then () => (float[2] t) { t = Add (a, a) },
                        else_branch = other () => (float[2] e) { e = Identity (x) }>
            z = Abs (unused)
        }"""
    )
    part = Loadable.of(net).only(["y"], inputs=["unused"])
    assert [node.op_type for node in part.proto.graph.node] == ["Neg", "If"]
    assert [value.name for value in part.proto.graph.input] == ["x", "unused", "c"]
    assert [value.name for value in Loadable.of(net).only(["y"], inputs=[]).proto.graph.input] == ["x", "c"]
    x = np.array([1, 2], np.float32)
    found = part.open().run(None, {"x": x, "unused": x, "c": np.array(True)})
    np.testing.assert_array_equal(found[0], -2 * x)


def test_the_model_in_a_file_is_read_again_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    first, second = graph(), model("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    save_model(first, path)
    source = GraphIndex(graph())
    kept = share_model(first, path, source)
    assert shared_model(path, source) is kept
    assert shared_model(path, GraphIndex(graph())) is not kept, "a model of another job has its own"
    save_model(second, path)
    assert [node.op_type for node in shared_model(path, source).graph] == ["Neg"]
