"""Test `edgeq device setup` when it cannot succeed: one line tells what to do, and no files are left."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest

from edgeq.errors import BoardError, DataError
from edgeq.hardware.detect import Machine
from edgeq.hardware.engines import Installed
from edgeq.remote.devices import find_board
from edgeq.remote.machine import BoardState, Description
from edgeq.remote.setup import _list_missing_packages, set_up
from tests.remote.conftest import FakeBoard

# Makes an environment whose Python answers like pip without an index.
_VENV = """case "$*" in *"-m venv"*)
  for place in "$@"; do :; done
  mkdir -p "$place/bin"
  printf '#!/bin/sh\\necho "ERROR: No matching distribution found for numpy" >&2; exit 1\\n' > "$place/bin/python"
  chmod +x "$place/bin/python"; exit;; esac
exec {python} "$@" """


def test_a_python_that_makes_no_environments(board: FakeBoard) -> None:
    fails = 'case "$*" in *"-m venv"*) echo "ensurepip is not available" >&2; exit 1;; esac'
    board.python(f'{fails}\nexec {sys.executable} "$@"')
    with pytest.raises(BoardError, match=r"venv is missing.*Install python3-venv there"):
        set_up(find_board(board.address))
    assert not (board.cache / "venv").exists()


def test_no_index_is_reached(board: FakeBoard) -> None:
    board.python(_VENV.format(python=sys.executable))
    with pytest.raises(BoardError, match=r"No matching distribution.*pip download.*device setup ssh://pi `wheels`"):
        set_up(find_board(board.address))
    assert not (board.cache / "venv").exists()


def test_no_wheels(board: FakeBoard, tmp_path: Path) -> None:
    board.python(_VENV.format(python=sys.executable))
    with pytest.raises(DataError, match="has no wheels"):
        set_up(find_board(board.address), wheels=tmp_path)


def test_a_board_that_is_known_by_name_hears_of_its_npu() -> None:
    machine = Machine(architecture="arm64", os="Linux", board="Radxa ROCK 5B")
    (line,) = _list_missing_packages(Description(machine, {}, cast(BoardState, None)))
    assert line.startswith(
        "for Rockchip's NPU: python -m pip install rknn-toolkit-lite2==2.5.0. The board needs the rknpu"
    )
    installed = {"rknnlite": Installed("2.5.0")}
    assert not list(_list_missing_packages(Description(machine, installed, cast(BoardState, None))))
