"""Find a reader for each TOML block of the pages, among the readers of files that users write."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgeq.cli import group
from edgeq.cli._recipe import read_recipe as _recipe_steps
from edgeq.data.preprocess import parse_spec
from edgeq.errors import EdgeqError
from edgeq.hardware import profile as document
from edgeq.hardware import profile as schema
from edgeq.hardware.target import resolve
from edgeq.model.int8_rules import int8_rules
from edgeq.remote.devices import find_boards
from edgeq.reporting.gate import read_limits


def _project(path: Path) -> None:
    if "name" not in tomllib.loads(path.read_text("utf-8")).get("project", {}):
        raise EdgeqError("no project")


def _preprocessing(path: Path) -> None:
    parse_spec(tomllib.loads(path.read_text("utf-8")), str(path))


def _hardware(path: Path) -> None:
    document.read_document(path, schema.EitherFile)
    resolve(str(path))


def _rules(path: Path) -> None:
    int8_rules(path.stem, path.parent)


def _recipe(path: Path) -> None:
    _recipe_steps(path, group)


def _devices(path: Path) -> None:
    if not find_boards(str(path)):
        raise EdgeqError("no boards")


READERS: Mapping[str, Callable[[Path], Any]] = {
    "pyproject": _project,
    "preprocessing": _preprocessing,
    "int8 rules": _rules,
    "recipe": _recipe,
    "devices": _devices,
    "gate": read_limits,
    "profile or target": _hardware,
}


def read_by_one(path: Path, text: str) -> None:
    """Write `text` to `path` and read it with the first reader that accepts it.

    Raises:
        AssertionError: no reader accepts it; the text contains the error of each.
    """
    path.write_text(text, "utf-8")
    refused = []
    for name, read in READERS.items():
        try:
            read(path)
        except EdgeqError as error:
            refused.append(f"{name}: {error}")
        else:
            return
    raise AssertionError("no reader takes this:\n" + "\n".join(refused))
