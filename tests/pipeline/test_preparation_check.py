"""A preparation that changes what a model computes does not pass unnoticed."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from edgeq.pipeline.preparation_check import check_preparation
from tests.backends.build import Bench, bench
from tests.graphs import proto

BODY = "g (float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) {{ a = Relu (x) y = {} }}"


def prepared_as(folder: Path, node: str) -> Bench:
    return bench(folder, proto(BODY.format(node)))


@pytest.mark.parametrize(("node", "noted"), [("Neg (a)", 0), ("Abs (a)", 1)])
def test_another_result_is_noted(tmp_path: Path, node: str, noted: int) -> None:
    made = prepared_as(tmp_path, "Neg (a)")
    onnx.save(proto(BODY.format(node)), made.prepared.source)
    found = check_preparation(made.prepared, made.samples)
    new = found.notes[len(made.prepared.notes) :]
    assert ["preparation changed what the model computes" in note for note in new] == [True] * noted


def test_what_cannot_be_compared_is_left_alone(tmp_path: Path) -> None:
    made = prepared_as(tmp_path, "RandomNormalLike (a)")
    assert check_preparation(made.prepared, made.samples) is made.prepared
    made = prepared_as(tmp_path, "Neg (a)")
    made.prepared.source.write_bytes(b"no model")
    assert check_preparation(made.prepared, made.samples) is made.prepared
