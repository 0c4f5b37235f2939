"""Moves of several files that count as one: written down first, so that the next run can undo what a kill cut off.

In the private folder beside an output, `new/` holds what was written, `old/` what stood there, and `placing.json` is
there while files are on their way. Everything old is moved away before anything new comes, the output itself first: a
model with the data of another one is never there to be read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from edgeq_device.errors import DeviceError
from edgeq_device.moves import move_new
from edgeq_device.plainjson import parse_json

from edgeq.errors import OutputError

NEW, OLD, RECORD = "new", "old", "placing.json"
_STEM = 100

Identity = tuple[int, int]
"""Of a file: its number in the file system and when it was written. A rename changes neither."""


def stage_name(path: Path) -> str:
    """A fresh name for the private folder beside the output `path`."""
    return f".{path.name[:_STEM]}.{secrets.token_hex(8)}.partial"


def identity(path: Path) -> Identity | None:
    """Of what is at `path`, a link itself and not what it leads to; None where nothing is."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    # Of a directory the number alone: what is put into it changes its time.
    return found.st_ino, 0 if stat.S_ISDIR(found.st_mode) else found.st_mtime_ns


def place(
    stage: Path,
    folder: Path,
    names: Sequence[str],
    check: Callable[[Path], None] = lambda old: None,
    *,
    force: bool,
    gone: Iterable[str] = (),
) -> None:
    """Move `names` from `stage`/new into `folder`, all or none of them.

    Args:
        names: the output itself is the last.
        gone: what else moves to `stage`/old.
        force: what has such a name moves to `stage`/old.
        check: of what was moved to `stage`/old; what it raises undoes everything.

    Raises:
        FileExistsError: something is at one of the places, or came to it meanwhile.
    """
    drafts = {**dict.fromkeys(gone), **{name: identity(stage / NEW / name) for name in names}}
    (stage / OLD).mkdir()
    _write(stage, drafts)
    try:
        for name in reversed(drafts):
            if force and os.path.lexists(folder / name):
                _move_away(folder / name, stage / OLD / name)
                check(stage / OLD / name)
        for name in names:
            move_new(stage / NEW / name, folder / name)
    except BaseException:
        _undo(stage, folder, drafts)
        raise
    (stage / RECORD).unlink()


def _move_away(source: Path, place: Path) -> None:
    """Move what is at `source`. A folder in a lower layer of an overlay, which cannot be renamed, is copied first and
    removed then."""
    try:
        move_new(source, place)
    except OSError as error:
        if error.errno != errno.EXDEV or source.is_symlink() or not source.is_dir():
            raise
        draft = place.with_name(f"{place.name}.copy")
        shutil.copytree(source, draft, symlinks=True)
        move_new(draft, place)
        shutil.rmtree(source)


def is_open(stage: Path) -> bool:
    """Whether moves of `stage` are under way, or were cut off."""
    return (stage / RECORD).exists()


def interrupted(path: Path) -> bool:
    """Whether moves to `path` are under way, or were cut off."""
    return any(map(is_open, stages(path)))


def settle(path: Path) -> None:
    """Finish what a killed run began at `path`: where the output itself has come everything has, else undo it. Only
    where nobody else is at work in the folder.

    Raises:
        OutputError: something else stands there now.
    """
    for stage in filter(is_open, stages(path)):
        drafts = _read(stage)
        if not drafts:
            continue
        last = next(reversed(drafts))
        if identity(path.parent / last) != drafts[last]:
            try:
                _undo(stage, path.parent, drafts)
            except FileExistsError as error:
                raise OutputError(
                    f"{error.filename} is in the way of what an interrupted run has to put back from {stage / OLD}",
                    "Move it, or move back what is in that folder and remove it",
                ) from error
        shutil.rmtree(stage, ignore_errors=True)


def stages(path: Path) -> Sequence[Path]:
    """Return the private folders beside `path`: of runs under way, or that were killed."""
    pattern = re.compile(rf"\.{re.escape(path.name[:_STEM])}\.[0-9a-f]{{16}}\.partial")
    try:
        with os.scandir(path.parent) as entries:
            found = [entry.name for entry in entries if pattern.fullmatch(entry.name)]
    except OSError:  # no such folder, or one that cannot be read
        return ()
    return [path.parent / name for name in sorted(found)]


def _undo(stage: Path, folder: Path, drafts: dict[str, Identity | None]) -> None:
    for name, new in reversed(drafts.items()):
        if new is None or identity(folder / name) != new:
            continue
        if os.path.lexists(stage / NEW / name):  # a move by linking got half way
            (folder / name).unlink()
        else:
            os.replace(folder / name, stage / NEW / name)
    for name in drafts:
        if os.path.lexists(stage / OLD / name):
            move_new(stage / OLD / name, folder / name)
    (stage / RECORD).unlink()


def _write(stage: Path, drafts: dict[str, Identity | None]) -> None:
    draft = stage / f"{RECORD}.draft"
    draft.write_text(json.dumps(drafts), "utf-8")
    os.replace(draft, stage / RECORD)


def _read(stage: Path) -> dict[str, Identity | None] | None:
    """What `_write` wrote; None where it is something else."""
    try:
        plain = parse_json((stage / RECORD).read_bytes(), str(stage))
    except (DeviceError, OSError):
        return None
    if not all(Path(name).name == name and _is_identity(value) for name, value in plain.items()):
        return None
    return {name: (value[0], value[1]) if value is not None else None for name, value in plain.items()}


def _is_identity(value: object) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(isinstance(p, int) for p in value))
