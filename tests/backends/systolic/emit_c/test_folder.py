"""Test the C that travels in a bundle. tests/cli/test_emit_c.py tests the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeq.backends.base import Artifact
from edgeq.backends.systolic.emit_c import folder as emitting
from edgeq.backends.systolic.emit_c.folder import first_inputs, with_c
from edgeq.backends.systolic.program import Conv, Float, Program
from edgeq.backends.systolic.save import save_program
from edgeq.data.samples import Samples, open_samples
from edgeq.demo import CALIBRATION, MODEL
from edgeq.hardware.target import resolve
from edgeq.model.load import model_signature
from tests.backends.systolic.emit_c.programs import program_of


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(MODEL, str(CALIBRATION), count=4)[0]


@pytest.fixture
def samples() -> Samples:
    return open_samples(str(CALIBRATION), model_signature(MODEL), count=3)


def built(program: Program | None, folder: Path) -> Artifact:
    target = resolve("gemmini")
    files = {}
    if program is not None:
        files["model.program.npz"] = folder / "model.program.npz"
        save_program(program, files["model.program.npz"])
    return Artifact(folder / "model.onnx", target.profile.scheme, "CPUExecutionProvider", files=files)


def test_the_c_is_among_the_files(program: Program, samples: Samples, tmp_path: Path) -> None:
    before = built(program, tmp_path)
    after = with_c(before, samples, tmp_path / "c", count=2)
    assert {"model.program.npz", "c/main.c", "c/portable/include/gemmini.h"} <= set(after.files)
    assert all(path.is_file() for path in after.files.values())
    assert after.notes == ()


def test_leaves_artifacts_without_a_program_unchanged(samples: Samples, tmp_path: Path) -> None:
    before = built(None, tmp_path)
    assert with_c(before, samples, tmp_path / "c", count=2) is before


def test_why_there_is_no_c_is_a_note(
    program: Program, samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = next(n for n, step in enumerate(program.steps) if isinstance(step, Conv) and n > 2)
    conv = program.steps[at]
    assert isinstance(conv, Conv)
    odd = Float("odd", (conv.input,), (conv.output,), b"", {"sine": "no such thing"})
    without = replace(program, steps=(*program.steps[:at], odd, *program.steps[at + 1 :]))
    refused = with_c(built(without, tmp_path), samples, tmp_path / "c", count=2)
    assert len(refused.notes) == 1
    assert "no C bundle: node 'sine' runs in float" in refused.notes[0]
    monkeypatch.setattr(emitting, "MOST_WEIGHTS", 10)
    large = with_c(built(program, tmp_path), samples, tmp_path / "c", count=2)
    assert "too many to include" in large.notes[0]
    assert set(large.files) == {"model.program.npz"}


def test_as_many_samples_as_there_are(program: Program, samples: Samples) -> None:
    for asked, got in ((2, 2), (9, 3)):
        assert {len(values) for values in first_inputs(program, samples, asked).values()} == {got}
    first = next(iter(samples)).inputs
    stacked = first_inputs(program, samples, 1)
    assert all(np.array_equal(stacked[name], first[name]) for name in stacked)
