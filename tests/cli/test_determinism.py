"""The same command gives the same bytes, whatever the hash seed, the working directory and the order of targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq import demo
from tests.cli import process
from tests.cli.room import contents

DATA = ("--data", str(demo.CALIBRATION), "--count", "16", "--no-timing")
TARGETS = (("-t", "haswell"), ("-t", "raspberry-pi-4"))


@pytest.mark.parametrize(
    ("command", "first", "second", "output"),
    [
        ("quantize", (), (), "int8.onnx"),
        ("quantize", ("--dynamic",), ("--dynamic",), "int8.onnx"),
        ("package", ("--with-float", *TARGETS[0], *TARGETS[1]), ("--with-float", *TARGETS[1], *TARGETS[0]), "bundle"),
        ("package", (), (), "bundle.edgeq"),
    ],
    ids=["quantize", "dynamic", "package", "archive"],
)
def test_twice_the_same_bytes(
    tmp_path: Path, command: str, first: tuple[str, ...], second: tuple[str, ...], output: str
) -> None:
    made = []
    for name, seed, options in (("here", "1", first), ("else where", "2", second)):
        place = tmp_path / name
        place.mkdir()
        env = {"PYTHONHASHSEED": seed, "TMPDIR": str(place)}
        done = process.run(command, demo.MODEL, *DATA, "-o", output, *options, cwd=place, env=env)
        assert done.returncode == 0, done.stderr
        made.append({name: digest for name, digest in contents(place).items() if name.startswith(output)})
    assert made[0]
    assert made[0] == made[1]
