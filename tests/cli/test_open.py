"""Test that `report --open` runs the system's program, never one in the working directory."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from edgeq.cli._common import Printer
from edgeq.cli.explain import _open

PROGRAM = {"darwin": "open"}.get(sys.platform, "xdg-open")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows opens pages without PATH")


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("entries", ["", ".", "theirs", "./theirs", ":", ".:theirs:"])
def test_no_program_of_the_working_directory_opens_a_page(
    entries: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "theirs"):
        for name in (PROGRAM, "firefox"):
            program(folder, name, f"touch {tmp_path}/OWNED")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", entries)
    _open(tmp_path / "page.html", Printer(as_json=False, quiet=False, verbose=False))
    assert "open " in capsys.readouterr().err
    # Like xdg-open, this program looks for a browser itself.
    program(tmp_path / "system", PROGRAM, f'firefox 2> /dev/null; echo "$1" > {tmp_path}/opened')
    monkeypatch.setenv("PATH", f"{entries}:{tmp_path}/system")
    _open(tmp_path / "page.html", Printer(as_json=False, quiet=False, verbose=False))
    deadline = time.monotonic() + 30
    while not (tmp_path / "opened").exists() or not (tmp_path / "opened").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (tmp_path / "opened").read_text() == f"{tmp_path}/page.html\n"
    assert not (tmp_path / "OWNED").exists()
