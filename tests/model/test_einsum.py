"""Test Einsum: every equation of two operands, and others, gives the same results as products and sums."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.model.einsum import write_einsums
from edgeq.model.prepare import prepare_model
from edgeq.run.session import SessionSettings, open_session
from tests.graphs import proto

SIZES = {"a": 2, "b": 3, "c": 4}


def terms(letters: str) -> Iterator[str]:
    """Yield every choice and order of some letters."""
    for count in range(len(letters) + 1):  # None, too: the result may be a scalar.
        yield from map("".join, itertools.permutations(letters, count))


def every_equation() -> Iterator[tuple[str, str, str]]:
    """Yield the terms of each equation of two operands over three letters, up to the names of the letters."""
    for left, right in itertools.product(("a", "ab", "abc"), terms("abc")):
        for result in terms("abc"):
            if right and set(result) <= set(left + right):
                yield left, right, result


def rewritten(
    equation: str, shapes: Sequence[Sequence[int | str]], sizes: Mapping[str, int], *, constants: Sequence[int] = ()
) -> list[str]:
    """Rewrite an Einsum, check its results, and return the operators that remain.

    Args:
        shapes: sizes of the operands; a text is the name of a free size.
        sizes: the free sizes of the run.
        constants: the operands that are weights.
    """
    random = np.random.default_rng(0)
    arrays = {
        f"x{place}": random.normal(size=[sizes.get(str(size), size) for size in shape]).astype(np.float32)
        for place, shape in enumerate(shapes)
    }
    inputs = [f"float[{','.join(map(str, s))}] x{n}" for n, s in enumerate(shapes) if n not in constants]
    weights = {f"x{place}": arrays.pop(f"x{place}") for place in constants}
    names = ", ".join(f"x{place}" for place in range(len(shapes)))
    text = f'g ({", ".join(inputs)}) => (float[] y) {{ [e] y = Einsum<equation="{equation}">({names}) }}'
    before = proto(text.replace("float[] y", "y"), weights)
    model = ir.serde.deserialize_model(before)
    count = write_einsums(model)
    kinds = [node.op_type for node in model.graph]
    assert count == ("Einsum" not in kinds)
    assert "e" in [node.name for node in model.graph]
    settings = SessionSettings(optimization="none")
    expected, found = (
        open_session(part.SerializeToString(), settings).run(None, arrays)[0]
        for part in (before, ir.serde.serialize_model(model))
    )
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    return kinds


def test_every_equation_of_two_operands() -> None:
    for left, right, result in every_equation():
        shapes = [[SIZES[letter] for letter in term] for term in (left, right)]
        kinds = rewritten(f"{left},{right}->{result}", shapes, {})
        assert "Einsum" not in kinds, (left, right, result)
        sums = set(left) & set(right) - set(result)
        assert ("MatMul" in kinds) == bool(sums), (left, right, result)


@pytest.mark.parametrize(
    ("equation", "shapes", "constants", "operators"),
    [
        ("bqd,dhe->bqhe", [["N", "T", 4], [4, 2, 3]], [1], ["MatMul", "Reshape"]),
        ("bqhe,hed->bqd", [["N", "T", 2, 3], [2, 3, 4]], [1], ["Reshape", "MatMul"]),
        ("bqhd,bkhd->bhqk", [["N", "T", 2, 3], ["N", "S", 2, 3]], [], ["Transpose", "Transpose", "MatMul"]),
        ("oi,bit->bot", [[5, 4], ["N", 4, "T"]], [0], ["Transpose", "MatMul", "Transpose"]),
        ("bhwc,hkc->bhwk", [["N", 3, 4, 5], [3, 6, 5]], [], None),
        ("...ij,...jk->...ik", [["N", 2, 3, 4], ["N", 2, 4, 5]], [], ["MatMul"]),
        ("...i,ij", [["N", 3, 4], [4, 5]], [1], ["MatMul"]),
        ("b...c->b...", [["N", 3, 4]], [], ["ReduceSum"]),
        ("ij->ji", [["N", 3]], [], ["Transpose"]),
        ("ij", [["N", 3]], [], ["Identity"]),
        ("ai,bi,ci->abc", [["N", 4], [3, 4], [5, 4]], [], None),
        (" b i , i j -> b j ", [["N", 4], [4, 5]], [1], ["MatMul"]),
    ],
)
def test_equations_of_exporters(
    equation: str, shapes: list[list[Any]], constants: list[int], operators: list[str] | None
) -> None:
    kinds = rewritten(equation, shapes, {"N": 2, "T": 6, "S": 7}, constants=constants)
    assert operators is None or kinds == operators
    assert "Einsum" not in kinds


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ii->i", [[3, 3]]),  # a diagonal
        ("abcde,acef->abdf", [["N", "T", "S", 3, 4], ["N", "S", 4, 5]]),  # two unknown sizes in one product
        ("ij,jk->ik", [[3, 1], [4, 5]]),  # an axis of size 1 that is broadcast
    ],
)
def test_others_stay(equation: str, shapes: list[list[Any]]) -> None:
    assert rewritten(equation, shapes, {"N": 2, "T": 6, "S": 7}) == ["Einsum"]


def test_preparation_writes_a_layer_as_a_product(tmp_path: Any) -> None:
    weights = {"w": np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)}
    text = 'g (float[N, T, 6] x) => (float[N, T, 5] y) { [e] y = Einsum<equation="btc,cd->btd">(x, w) }'
    (tmp_path / "model.onnx").write_bytes(proto(text, weights).SerializeToString())
    prepared = prepare_model(tmp_path / "model.onnx", tmp_path / "work")
    assert [(node.op_type, node.name) for node in prepared.model.graph] == [("MatMul", "e")]
    assert "1 Einsum written as a product" in prepared.notes
