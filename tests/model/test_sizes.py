"""Test free sizes of inputs, and their replacement with numbers."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from edgeq.cli._arguments import parse_sizes
from edgeq.errors import ModelError, UsageError
from edgeq.model.prepare import prepare_model
from edgeq.model.sizes import fix_sizes, free_sizes, require_fixed_sizes
from tests.graphs import model, proto

FREE = """g (float[N,3,H] x, float[?,2] z, float[4] w) => (float[N,3,H] y, float[?,2] v) <float[4] w = {1,2,3,4}> {
    [a] y = Relu(x) [b] v = Neg(z)
}"""
SOURCE = Path("net.onnx")


def test_free_sizes_have_a_name_or_a_place() -> None:
    assert free_sizes(model(FREE)) == ("N", "H", "z:0")


def test_numbers_take_their_place_wherever_they_are_named() -> None:
    fixed = model(FREE)
    fix_sizes(fixed, {"N": 1, "z:0": 5}, SOURCE)
    assert free_sizes(fixed) == ("H",)
    x, z, _ = fixed.graph.inputs
    assert list(x.shape)[:2] == [1, 3]
    assert list(z.shape) == [5, 2]
    assert fixed.graph.outputs[0].shape[0] == 1


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"net.onnx: no input has a free size 'batch'.*H, N, z:0"):
        fix_sizes(model(FREE), {"batch": 1}, SOURCE)


def test_free_sizes_are_refused_with_a_fix() -> None:
    with pytest.raises(
        ModelError, match=r"an NPU needs fixed sizes, .* N, H, z:0 free.*`fix` N=1 `fix` H=SIZE `fix` z:0=1, with the"
    ):
        require_fixed_sizes(model(FREE), SOURCE, "an NPU")


def test_preparation_computes_with_the_numbers(tmp_path: Path) -> None:
    body = """g (float[N,4] x) => (float[A,B] y) <int64[1] rest = {-1}, int64[1] zero = {0}> {
        [shape] s = Shape(x) [first] n = Gather(s, zero) [both] t = Concat<axis=0>(n, rest) [move] m = Reshape(x, t)
        [last] y = Relu(m)
    }"""
    onnx.save(proto(body), tmp_path / "net.onnx")
    prepared = prepare_model(tmp_path / "net.onnx", tmp_path / "work", fix={"N": 2})
    assert prepared.signature.inputs[0].shape == (2, 4)
    assert "Shape" not in {node.op_type for node in prepared.model.graph}
    assert any("N = 2" in note for note in prepared.notes)


@pytest.mark.parametrize("text", ["N", "=1", "N=0", "N=one", "N=-1", "N=" + "9" * 5000])
def test_a_size_is_a_name_and_a_number(text: str) -> None:
    assert parse_sizes(["N=1", "x:0=224"]) == {"N": 1, "x:0": 224}
    with pytest.raises(UsageError, match="is not NAME=SIZE"):
        parse_sizes([text])
