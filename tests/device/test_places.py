"""Temporary folders are deleted when the process ends, even if the code that created them did not delete them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from edgeq_device.system.places import make_temporary_folder

RUNTIME = Path(__file__).parents[2] / "targets" / "runtime"


def test_a_folder_that_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, remove = make_temporary_folder("edgeq-test-", "nothing")
    (folder / "inner").mkdir()
    assert folder.parent == tmp_path
    assert folder.name.startswith("edgeq-test-")
    remove()
    assert list(tmp_path.iterdir()) == []
    remove()


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise ValueError"])
def test_a_folder_that_is_left(end: str, tmp_path: Path) -> None:
    program = f"""
import sys, tempfile
sys.path.insert(0, {str(RUNTIME)!r})
tempfile.tempdir = {str(tmp_path)!r}
from edgeq_device.system.places import make_temporary_folder
folder, _ = make_temporary_folder("edgeq-test-", "nothing")
(folder / "file").write_text("x")
print(folder.name)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("edgeq-test-")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_leaves_it(tmp_path: Path) -> None:
    program = f"""
import os, sys, tempfile
sys.path.insert(0, {str(RUNTIME)!r})
tempfile.tempdir = {str(tmp_path)!r}
from edgeq_device.system.places import make_temporary_folder
folder, remove = make_temporary_folder("edgeq-test-", "nothing")
if child := os.fork():
    os.waitpid(child, 0)
    print(folder.is_dir())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert list(tmp_path.iterdir()) == []
