"""edgeq finds the node at which an engine fails by running the beginnings of a model."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from edgeq.backends.qnn.backend import failing_node, find_delegation
from edgeq.errors import EngineError
from edgeq.model.load import read_model
from edgeq.run.session import Engines, open_session
from tests import fake_engine
from tests.graphs import proto

PAIRED = """g (float[1,4] x) => (float[1,4] y) <float s = {0.1}, uint8 z = {128}> {
    xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z)
    [first] a = Abs(xd) aq = QuantizeLinear(a, s, z) ad = DequantizeLinear(aq, s, z)
    [second] b = Neg(xd) bq = QuantizeLinear(b, s, z) bd = DequantizeLinear(bq, s, z)
    [third] c = Tanh(bd) cq = QuantizeLinear(c, s, z) cd = DequantizeLinear(cq, s, z)
    [last] d = Add(ad, cd) dq = QuantizeLinear(d, s, z) y = DequantizeLinear(dq, s, z)
}"""


@pytest.mark.parametrize(("op_type", "name"), [("Abs", "first"), ("Neg", "second"), ("Tanh", "third"), ("Add", "last")])
def test_the_first_beginning_that_fails_ends_in_the_node(op_type: str, name: str, tmp_path: Path) -> None:
    onnx.save(proto(PAIRED), tmp_path / "m.onnx")
    parts = []

    def fails(beginning: Path) -> bool:
        model = onnx.load(beginning)
        open_session(beginning)
        parts.append(beginning)
        return op_type in {node.op_type for node in model.graph.node}

    node = failing_node(tmp_path / "m.onnx", fails, tmp_path)
    assert node is not None
    assert node.name == name
    assert len(parts) <= 2


@pytest.mark.parametrize(
    ("failures", "line"),
    [
        (1, r"fake failed once: .*SIGSEGV.* Try again"),
        (99, r"fake fails at node 'first' \(Abs\): .*SIGSEGV.* does not help, export"),
    ],
)
def test_a_failure_is_one_line_with_the_node_where_it_comes_again(
    failures: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(proto(PAIRED), tmp_path / "m.onnx")
    parts: list[Path] = []

    def assigned(self: Engines, engine: object, model: Path) -> tuple[tuple[str, ...], ...]:
        parts.append(model)
        if len(parts) <= failures:
            raise EngineError("the process of fake ended: signal SIGSEGV")
        return ()

    monkeypatch.setattr(Engines, "assigned_nodes", assigned)
    engine = fake_engine.install(tmp_path, monkeypatch)
    with pytest.raises(EngineError, match=line):
        find_delegation(read_model(tmp_path / "m.onnx"), tmp_path / "m.onnx", engine, {}, "a test", tmp_path)


def test_a_model_of_the_same_structure_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []

    def assigned(self: Engines, engine: object, model: Path) -> tuple[tuple[str, ...], ...]:
        compiled.append(model)
        return (("first", "second"), ("last",))

    monkeypatch.setattr(Engines, "assigned_nodes", assigned)
    engine = fake_engine.install(tmp_path, monkeypatch)
    delegations = []
    for number, text in enumerate((PAIRED, PAIRED.replace("0.1", "0.2"), PAIRED.replace("Neg", "Exp"))):
        file = tmp_path / f"{number}.onnx"
        onnx.save(proto(text), file)
        delegations.append(find_delegation(read_model(file), file, engine, {}, "a test", tmp_path).graphs)
    assert delegations == [(frozenset({"first", "second"}), frozenset({"last"}))] * 3
    assert compiled == [tmp_path / "0.onnx", tmp_path / "2.onnx"]
