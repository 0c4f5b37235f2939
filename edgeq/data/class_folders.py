"""Class sub-folders: which there are below the data, and what the place of a file says of its class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def class_folders(root: Path, files: tuple[Path, ...]) -> dict[str, int]:
    """Labels from sub-folders: where every file lies in one of at least two folders below `root`, a folder named by a
    number is that class, and other names are numbered in sorted order, with those of folders that hold none of `files`:
    a class of which there is no sample keeps its number."""
    parts = [path.relative_to(root).parts for path in files]
    if not parts or min(map(len, parts)) < 2:
        return {}
    found = {part[0] for part in parts}
    if len(found) < 2:
        return {}
    if all(name.isascii() and name.isdigit() for name in found) and len({int(n) for n in found}) == len(found):
        return {name: int(name) for name in found}
    beside = {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    return {name: index for index, name in enumerate(sorted(found | beside))}


def empty_classes(root: Path, files: tuple[Path, ...], classes: Mapping[str, int]) -> tuple[str, ...]:
    """A note on the class folders that hold none of the files, where there are such."""
    if not classes:
        return ()
    empty = sorted(set(classes) - {path.relative_to(root).parts[0] for path in files})
    if not empty:
        return ()
    some = ", ".join(empty[:3]) + (" …" if len(empty) > 3 else "")
    return (f"{root}: no samples of {len(empty)} of {len(classes)} class folders ({some}); they keep their numbers",)


def strays(root: Path, files: tuple[Path, ...]) -> tuple[str, ...]:
    """A note on the files beside folders that would be class folders without them, where there are such."""
    beside = [path.name for path in files if path.parent == root]
    if not beside or not class_folders(root, tuple(path for path in files if path.parent != root)):
        return ()
    others = f" and {len(beside) - 1} more" if len(beside) > 1 else ""
    return (f"{root}: the sub-folders give no labels, as {beside[0]}{others} lies in none of them",)


def place(path: Path, root: Path, classes: Mapping[str, int]) -> tuple[dict[str, Any], int | None]:
    """The context that a file's place gives its samples (its name, its path below `root`, its class folder), and the
    label of that folder; without `classes` neither."""
    below = path.relative_to(root)
    context = {"file": path.name, "path": below.as_posix()}
    if not classes:
        return context, None
    return {**context, "class": below.parts[0]}, classes[below.parts[0]]
