"""Moves of several files that count as one: written down first, so that the next run can undo what a kill cut off.

In the private folder beside an output, `new/` holds what was written, `old/` what stood there, and `placing.json` is
there while files are on their way. Everything old is moved away before anything new comes, the output itself first: a
model with the data of another one is never there to be read.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from edgeq_device.moves import move_new

from edgeq.atomic.leftovers import NEW, OLD, RECORD, STEM, Identity, is_open, read_record, stages
from edgeq.errors import OutputError


def stage_name(path: Path) -> str:
    """A fresh name for the private folder beside the output `path`."""
    return f".{path.name[:STEM]}.{secrets.token_hex(8)}.partial"


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


def settle(path: Path, *, filled: bool = False) -> None:
    """Finish what a killed run began at `path`: where the output itself has come everything has, else undo it. Only
    where nobody else is at work in the folder.

    Args:
        filled: the output is the folder of `path`, into which its files move one by one.

    Raises:
        OutputError: something else stands there now, or a leftover is none of this user's runs.
    """
    for stage in filter(is_open, stages(path)):
        drafts = read_record(stage, None if filled else path.name)
        last = next(reversed(drafts))
        if drafts[last] is None or identity(path.parent / last) != drafts[last]:
            try:
                _undo(stage, path.parent, drafts)
            except FileExistsError as error:
                raise OutputError(
                    f"{error.filename} is in the way of what an interrupted run has to put back from {stage / OLD}",
                    "Move it, or move back what is in that folder and remove it",
                ) from error
        shutil.rmtree(stage, ignore_errors=True)


def _undo(stage: Path, folder: Path, drafts: dict[str, Identity | None]) -> None:
    for name, new in reversed(drafts.items()):
        if new is None or identity(folder / name) != new:
            continue
        draft = stage / NEW / name
        if not os.path.lexists(draft):
            os.replace(folder / name, draft)
        elif os.path.samestat(draft.lstat(), (folder / name).lstat()):  # a move by linking got half way
            (folder / name).unlink()
    for name in drafts:
        if os.path.lexists(stage / OLD / name):
            move_new(stage / OLD / name, folder / name)
    (stage / RECORD).unlink()


def _write(stage: Path, drafts: dict[str, Identity | None]) -> None:
    draft = stage / f"{RECORD}.draft"
    draft.write_text(json.dumps(drafts), "utf-8")
    os.replace(draft, stage / RECORD)
