from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.backends.systolic.save import save_program
from edgeq.demo import CALIBRATION, MODEL
from tests.backends.systolic.emit_c.compilers import done, need
from tests.backends.systolic.emit_c.programs import program_of
from tests.cli.room import Room


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    """A quantized demo model's program, and its data."""
    program, inputs = program_of(MODEL, str(CALIBRATION), count=4)
    save_program(program, tmp_path / "int8.program.npz")
    (tmp_path / "int8.onnx").write_bytes(b"the model itself is not looked at")
    np.savez(tmp_path / "x.npz", **inputs)
    monkeypatch.chdir(tmp_path)
    return Room(tmp_path)


@pytest.mark.parametrize("program", ["int8.onnx", "int8.program.npz"])
def test_a_bundle_that_passes_its_self_test(room: Room, program: str) -> None:
    need("gcc", "make")
    ran = room.run("emit-c", program, "--data", "x.npz", "-o", "c", "--images", "3", "--json")
    assert ran.code == 0, ran.err
    told = ran.json()
    assert told["output"] == "c"
    assert (told["dim"], told["generation"], told["images"], told["outputs"]) == (16, "2023", 3, ["logits"])
    written = {path.relative_to("c").as_posix() for path in Path("c").rglob("*") if path.is_file()}
    assert {*told["files"], ".edgeq"} == written
    assert "self-test: passed" in done("make", "-s", "check", where=room.path / "c")
    human = room.run("emit-c", program, "--data", "x.npz", "-o", "c", "--generation", "2021", "--force")
    assert human.code == 0
    assert "make -C c check" in human.out


def test_mistakes_leave_nothing(room: Room) -> None:
    given = ("--data", "x.npz", "-o", "c")
    room.refused(2, "emit-c", "other.onnx", *given, says="other.program.npz is not there")
    room.refused(4, "emit-c", "int8.onnx", *given, "--images", "5", says="fewer than 5 samples")
    (room.path / "gemmini_params.h").write_text("#define DIM 8\n")
    header = ("--params-header", "gemmini_params.h")
    room.refused(5, "emit-c", "int8.onnx", *given, *header, says="DIM is 8, the target's is 16")
    (room.path / "damaged.program.npz").write_bytes(b"PK")
    room.refused(7, "emit-c", "damaged.program.npz", *given, says="holds no program")
    (room.path / "c").mkdir()
    room.refused(6, "emit-c", "int8.onnx", *given, says="--force")
