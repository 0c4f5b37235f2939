from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgeq.errors import RuntimeUnavailableError
from edgeq.model.edit import to_bytes
from edgeq.model.graph import name_of
from edgeq.model.load import read_model, save_model
from edgeq.model.sessions import open_in_memory
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
    session = open_in_memory(graph())  # nothing else refers to this one's weights
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
