from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from edgeq.backends.systolic.program import Program
from edgeq.backends.systolic.save import load_program, save_program
from edgeq.errors import BundleError
from tests.backends.systolic.graphs import program_of, random_graph


def equal(one: Program, other: Program) -> bool:
    if (one.name, one.array, one.inputs, one.outputs, one.tensors) != (
        other.name,
        other.array,
        other.inputs,
        other.outputs,
        other.tensors,
    ):
        return False
    for left, right in zip(one.steps, other.steps, strict=True):
        assert type(left) is type(right)
        for field in fields(left):
            a, b = getattr(left, field.name), getattr(right, field.name)
            if isinstance(a, np.ndarray):
                if a.dtype != b.dtype or not np.array_equal(a, b):
                    return False
            elif a != b:
                return False
    return True


@pytest.mark.parametrize("seed", range(8))
def test_a_program_comes_back_as_it_was(seed: int, tmp_path: Path) -> None:
    program = program_of(*random_graph(seed))
    save_program(program, tmp_path / "one.npz")
    again = load_program(tmp_path / "one.npz")
    assert equal(program, again)
    save_program(again, tmp_path / "two.npz")
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


def test_refuses_files_without_a_program(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    with pytest.raises(BundleError, match=r"bad.npz contains no program \(DataError.*cannot be read"):
        load_program(path)
    path.write_bytes(b"PK nothing")
    with pytest.raises(BundleError, match="not a zip file"):
        load_program(path)
    np.savez(path, other=np.zeros(3))
    with pytest.raises(BundleError, match="KeyError"):
        load_program(path)
    np.savez(path, program=np.frombuffer(json.dumps({"format": 99}).encode(), np.uint8))
    with pytest.raises(BundleError, match="format 99"):
        load_program(path)
    np.savez(path, program=np.array([{"a": 1}], dtype=object))
    with pytest.raises(BundleError, match="pickled Python objects"):
        load_program(path)
