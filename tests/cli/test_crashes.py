"""Kill whole commands: the output is the old or the new one, and the next run gives the result of an undisturbed run.

tests/util/test_atomic.py tries every moment of the moves, `scripts/benchmark kills` random ones.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from edgeq import demo
from edgeq.cli import group
from tests.cli.workspace import Workspace, contents
from tests.crashes import killed_before

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

GOOD = ("net.onnx", "--data", "x.npz", "-q")


def edgeq(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        group.main(list(arguments), prog_name="edgeq")
    assert not end.value.code, arguments


def whole(place: Path) -> dict[str, str]:
    """Return the contents of a folder without unfinished outputs."""
    return {name: digest for name, digest in contents(place).items() if ".partial" not in name}


@pytest.mark.parametrize(
    ("output", "command", "again"),
    [
        ("int8.onnx", ("quantize", *GOOD, "--no-timing"), "--force"),
        pytest.param("bundle", ("package", *GOOD, "--no-timing"), "--force", marks=pytest.mark.slow),
        ("CAL", ("calibrate", *GOOD), "--resume"),
    ],
    ids=["quantize", "package", "calibrate"],
)
def test_kills_before_each_rename(workspace: Workspace, output: str, command: tuple[str, ...], again: str) -> None:
    place = workspace.path / "out"
    place.mkdir()
    arguments = (*command, "-o", f"out/{output}")
    for number in range(1, 10):
        if not killed_before(lambda: edgeq(*arguments), place, number, {"os.rename"}):
            break
        assert whole(place) == {}, number
    right = whole(place)
    assert number > 1
    assert {Path(name).parts[0] for name in right} == {output}
    for last in range(1, 10):
        ended = not killed_before(lambda: edgeq(*arguments, again), place, last, {"os.rename"})
        assert whole(place) == right, last
        if ended:
            break
    assert last > 1


@pytest.mark.slow
def test_a_tuning_run_goes_on_after_a_kill(tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    data = ("--data", str(demo.CALIBRATION), "--count", "4", "-t", "gemmini", "--max-drop", "0.2", "-q")
    arguments = ("tune", str(demo.MODEL), *data, "-o", str(place / "bundle"), "--resume")
    edgeq(*arguments)
    models = {name: digest for name, digest in contents(place).items() if name.endswith((".onnx", ".npz"))}
    shutil.rmtree(place)
    place.mkdir()
    # By then there are a marker, statistics and a journal. The two kills cut them off at different places.
    for number in (3, 12):
        assert killed_before(lambda: edgeq(*arguments), place, number)
        assert not (place / "bundle").exists()
    edgeq(*arguments)
    found = whole(place)
    assert {name: digest for name, digest in found.items() if name.endswith((".onnx", ".npz"))} == models
    assert {Path(name).parts[0] for name in found} == {"bundle"}
