"""Test that a command gives the same bytes, whatever the hash seed, the working directory and the order of targets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from edgeq import demo
from tests.cli import process
from tests.cli.workspace import contents

# Runs all commands in one process. The test starts two of them, which differ only in what must not matter.
COMMANDS = """
import sys
from edgeq.cli import group

model, data, *targets = sys.argv[1:]
same = ("--data", data, "--count", "3", "--no-timing", "-q")
for line in (
    ("quantize", model, *same, "-o", "int8.onnx"),
    ("quantize", model, *same, "-o", "dynamic.onnx", "--dynamic", *("--op-type", "Conv", "--weight-type", "uint8")),
    ("package", model, *same, "-o", "bundle", "--with-float", "--no-emulate", *(a for t in targets for a in ("-t", t))),
    ("package", model, *same, "-o", "bundle.edgeq"),
    ("calibrate", model, *same[:4], "-q", "-o", "statistics"),
):
    try:
        group.main(list(line), prog_name="edgeq")
    except SystemExit as end:
        assert not end.code, (line, end.code)
"""
MADE = {"int8.onnx", "dynamic.onnx", "bundle", "bundle.edgeq", "statistics"}


def test_twice_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for name, seed, targets in (
        ("here", "1", ("haswell", "raspberry-pi-4")),
        ("else where", "2", ("raspberry-pi-4", "haswell")),
    ):
        place = tmp_path / name
        place.mkdir()
        done = subprocess.run(
            [sys.executable, "-P", "-c", COMMANDS, str(demo.MODEL), str(demo.CALIBRATION), *targets],
            cwd=place,
            env=process.environment(PYTHONHASHSEED=seed),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        made.append(contents(place))
    assert {Path(name).parts[0] for name in made[0]} == MADE
    assert [name for name in made[0] if made[0][name] != made[1].get(name)] == []
    assert made[0].keys() == made[1].keys()
