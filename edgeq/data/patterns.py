"""Patterns of paths with *, ? and **: the files that match, each once, however folders link to each other."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgeq.data.records import MAX_FILES
from edgeq.errors import DataError

_ANY_DEPTH = "**"


def matching_files(pattern: str) -> list[Path]:
    """The files that `pattern` matches as Python's `glob` understands it, sorted; a file that `**` reaches by several
    paths once, by one without links where there is one.

    Raises:
        DataError: more folders than a data set can have.
    """
    parts = Path(pattern).parts
    if _ANY_DEPTH not in parts:
        return sorted(path for path in map(Path, glob.glob(pattern)) if path.is_file())  # noqa: PTH207  # absolute too
    fixed = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    root, below = Path(*parts[:fixed]), parts[fixed:]
    hidden = any(part.startswith(".") for part in below)
    found = [path for path in _Search(pattern, hidden).files(root, ()) if _fits(path.relative_to(root).parts, below)]
    place = {parent: os.path.realpath(parent) for parent in {path.parent for path in found}}
    found.sort(key=lambda path: (place[path.parent] != os.path.abspath(path.parent), path))  # noqa: PTH100  # links stay
    once: dict[tuple[str, str], Path] = {}
    for path in found:
        once.setdefault((place[path.parent], path.name), path)
    return sorted(once.values())


class _Search:
    """Every file below a folder. Links are followed, but not to a folder that the path came through.

    Args:
        pattern: for messages.
        hidden: whether names that begin with a dot count.
    """

    def __init__(self, pattern: str, hidden: bool) -> None:
        self._pattern, self._hidden = pattern, hidden
        self._entered = 0

    def files(self, folder: Path, above: tuple[str, ...]) -> Iterator[Path]:
        """The files below `folder`, reached through the real paths `above`."""
        real = os.path.realpath(folder)
        if real in above:
            return
        self._entered += 1
        if self._entered > MAX_FILES:
            raise DataError(f"{self._pattern} leads through over {MAX_FILES} folders", "Give a smaller folder")
        try:
            with os.scandir(folder) as entries:
                within = sorted(entries, key=lambda entry: entry.name)
        except OSError:  # as glob has it: what may not be read matches nothing
            return
        for entry in within:
            if entry.name.startswith(".") and not self._hidden:
                continue
            path = folder / entry.name
            known = path if entry.is_symlink() else entry  # an entry knows without another look at the disk
            if known.is_dir():
                yield from self.files(path, (*above, real))
            elif known.is_file():
                yield path


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not names
    first, rest = pattern[0], pattern[1:]
    if first == _ANY_DEPTH:
        return _fits(names, rest) or (bool(names) and not names[0].startswith(".") and _fits(names[1:], pattern))
    if not names or (names[0].startswith(".") and not first.startswith(".")):
        return False
    return fnmatch.fnmatch(names[0], first) and _fits(names[1:], rest)
