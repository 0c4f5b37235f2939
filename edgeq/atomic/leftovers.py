"""Private folders that killed runs left next to an output, believed only where a run of this user can have left them.

A folder from somebody else can hold one that was made by hand: with a link for `old`, moving "back" what its record
lists would take files from anywhere. So the folder, `new` and `old` have to be real folders of this user that nobody
else can write, and the record may name the output and the files that come with it alone.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from edgeq_device.errors import DeviceError
from edgeq_device.plainjson import MAX_BYTES, parse_json

from edgeq.errors import OutputError

NEW, OLD, RECORD = "new", "old", "placing.json"
STEM = 100

Identity = tuple[int, int]
"""The number of a file in its file system and the time it was written. A rename changes neither."""


def stages(path: Path) -> Sequence[Path]:
    """Return the private folders next to `path`: of runs under way, or that were killed."""
    pattern = re.compile(rf"\.{re.escape(path.name[:STEM])}\.[0-9a-f]{{16}}\.partial")
    try:
        with os.scandir(path.parent) as entries:
            found = [entry.name for entry in entries if pattern.fullmatch(entry.name)]
    except OSError:  # no such folder, or one that cannot be read
        return ()
    return [path.parent / name for name in sorted(found)]


def is_open(stage: Path) -> bool:
    """Return whether moves of `stage` are under way, or were cut off."""
    return os.path.lexists(stage / RECORD)


def interrupted(path: Path) -> bool:
    """Return whether moves to `path` are under way, or were cut off."""
    return any(map(is_open, stages(path)))


def check_own(stage: Path) -> None:
    """Refuse a private folder that no run of this user can have left.

    Raises:
        OutputError: it or a folder in it is a link, belongs to somebody else, or can be written by others.
    """
    for place in (stage, stage / NEW, stage / OLD):
        try:
            found = place.lstat()
        except FileNotFoundError:  # not made yet, or removed already
            continue
        _check_mine(stage, place, found)
        if not stat.S_ISDIR(found.st_mode):
            raise _foreign(stage, f"{place.name} is a link or no folder")
    if os.name == "posix" and stage.lstat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _foreign(stage, "others can write into it")


def read_record(stage: Path, output: str | None) -> dict[str, Identity | None]:
    """Return what the record in `stage` says is on its way: the identity of each new file, None for what only goes.

    Args:
        output: name of the output, the last that moves; None where the files of a folder move, whatever they are.

    Raises:
        OutputError: `check_own`; or the record is damaged, or names what is none of the output's.
    """
    check_own(stage)
    record = stage / RECORD
    found = record.lstat()
    _check_mine(stage, record, found)
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
        raise _foreign(stage, f"{RECORD} is no small file")
    try:
        plain = parse_json(record.read_bytes(), RECORD)
    except DeviceError as error:
        raise _foreign(stage, error.problem) from error
    if not plain or not all(_is_name(name) and _is_identity(value) for name, value in plain.items()):
        raise _foreign(stage, f"{RECORD} is not as edgeq writes it")
    drafts = {name: (value[0], value[1]) if value is not None else None for name, value in plain.items()}
    if output is not None:
        _check_names(stage, list(drafts), output)
    return drafts


def names(path: Path, sibling: str) -> bool:
    """Tell whether the file at `path` names `sibling` anywhere in its bytes."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as held:
        return held.find(os.fsencode(sibling)) >= 0


def _check_names(stage: Path, drafts: Sequence[str], output: str) -> None:
    """Refuse a record whose last name is not the output's, or with another that no companion of it has.

    A companion is a file, named after the output or in it, as a model names its external data.
    """
    if drafts[-1] != output:
        raise _foreign(stage, f"{RECORD} is of another output")
    for name in drafts[:-1]:
        after = name.startswith(f"{Path(output).stem}.")
        named = not name.startswith(".") and any(
            place.is_file() and not place.is_symlink() and names(place, name)
            for place in (stage / NEW / output, stage / OLD / output, stage.parent / output)
        )
        found = [place.lstat().st_mode for place in (stage / NEW / name, stage / OLD / name) if os.path.lexists(place)]
        if not (after or named) or not all(map(stat.S_ISREG, found)):
            raise _foreign(stage, f"{RECORD} names {name!r}, which is none of {output}")


def _check_mine(stage: Path, place: Path, found: os.stat_result) -> None:
    if os.name == "posix" and found.st_uid != os.geteuid():
        raise _foreign(stage, f"{place.name} belongs to another user")


def _is_name(name: str) -> bool:
    """Tell whether `name` is that of something in a folder, and leads nowhere else."""
    return name not in ("", ".", "..") and "\0" not in name and Path(name).name == name


def _is_identity(value: object) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(isinstance(p, int) for p in value))


def _foreign(stage: Path, why: str) -> OutputError:
    return OutputError(
        f"{stage} is named like what an interrupted run leaves, and is not taken over: {why}",
        "Remove it if it is not yours; else move what is in its folder old back, and remove it then",
    )
