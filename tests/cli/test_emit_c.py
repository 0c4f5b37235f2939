from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.backends.systolic.save import save_program
from edgeq.demo import CALIBRATION, MODEL
from tests.backends.systolic.emit_c.compilers import done, need
from tests.backends.systolic.emit_c.programs import program_of
from tests.cli.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Make a folder with the program of the quantized demo model and its data."""
    program, inputs = program_of(MODEL, str(CALIBRATION), count=4)
    save_program(program, tmp_path / "int8.program.npz")
    (tmp_path / "int8.onnx").write_bytes(b"the model itself is not looked at")
    np.savez(tmp_path / "x.npz", **inputs)
    monkeypatch.chdir(tmp_path)
    return Workspace(tmp_path)


@pytest.mark.parametrize("program", ["int8.onnx", "int8.program.npz"])
def test_a_bundle_that_passes_its_self_test(workspace: Workspace, program: str) -> None:
    need("gcc", "make")
    ran = workspace.run("emit-c", program, "--data", "x.npz", "-o", "c", "--images", "3", "--json")
    assert ran.code == 0, ran.err
    report = ran.json()
    assert report["output"] == "c"
    assert (report["dim"], report["generation"], report["images"], report["outputs"]) == (16, "2023", 3, ["logits"])
    written = {path.relative_to("c").as_posix() for path in Path("c").rglob("*") if path.is_file()}
    assert {*report["files"], ".edgeq"} == written
    assert "self-test: passed" in done("make", "-s", "check", folder=workspace.path / "c")
    human = workspace.run("emit-c", program, "--data", "x.npz", "-o", "c", "--generation", "2021", "--force")
    assert human.code == 0
    assert "make -C c check" in human.out


def test_mistakes_leave_nothing(workspace: Workspace) -> None:
    given = ("--data", "x.npz", "-o", "c")
    workspace.refused(2, "emit-c", "other.onnx", *given, says="other.program.npz does not exist")
    workspace.refused(4, "emit-c", "int8.onnx", *given, "--images", "5", says="fewer than 5 samples")
    (workspace.path / "gemmini_params.h").write_text("#define DIM 8\n")
    header = ("--params-header", "gemmini_params.h")
    workspace.refused(5, "emit-c", "int8.onnx", *given, *header, says="DIM is 8, the target's is 16")
    (workspace.path / "damaged.program.npz").write_bytes(b"PK")
    workspace.refused(7, "emit-c", "damaged.program.npz", *given, says="contains no program")
    (workspace.path / "c").mkdir()
    workspace.refused(6, "emit-c", "int8.onnx", *given, says="--force")
