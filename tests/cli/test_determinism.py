"""The same command gives the same bytes, whatever the hash seed, the working directory and the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq import demo
from tests.cli import process
from tests.cli.room import contents

DATA = ("--data", str(demo.CALIBRATION), "--val", str(demo.VALIDATION), "--task", "classification", "--no-timing")


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (("quantize",), "int8.onnx"),
        (("quantize", "--dynamic"), "int8.onnx"),
        (("package", "--with-float", "-t", "haswell", "-t", "raspberry-pi-4"), "bundle"),
        (("package", "-t", "raspberry-pi-4", "-t", "haswell"), "bundle.edgeq"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_twice_the_same_bytes(tmp_path: Path, command: tuple[str, ...], output: str) -> None:
    made = []
    for name, seed in (("here", "1"), ("else where", "2")):
        place = tmp_path / name
        place.mkdir()
        env = {"PYTHONHASHSEED": seed, "TMPDIR": str(place)}
        done = process.run(command[0], demo.MODEL, *DATA, "-o", output, *command[1:], cwd=place, env=env)
        assert done.returncode == 0, done.stderr
        made.append({name: digest for name, digest in contents(place).items() if name.startswith(output)})
    assert made[0]
    assert made[0] == made[1]
