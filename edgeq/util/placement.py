"""Move several files as one step, undo what a killed run left, and lock a folder.

Private folders that killed runs left next to an output, believed only where a run of this user can have left them.

A folder from somebody else can hold one that was made by hand: with a link for `old`, moving "back" what its record
lists would take files from anywhere. So the folder, `new` and `old` have to be real folders of this user that nobody
else can write, and the record may name the output and the files that come with it alone.

Moves of several files that count as one: written down first, so that the next run can undo what a kill cut off.

In the private folder next to an output, `new/` holds what was written, `old/` what stood there, and `placing.json` is
there while files are on their way. Everything old is moved away before anything new comes, the output itself first: a
model with the data of another one is never there to be read.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edgeq_device.errors import DeviceError
from edgeq_device.places import move_new
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
        raise _foreign(stage, f"{RECORD} is not a small file")
    try:
        plain = parse_json(record.read_bytes(), RECORD)
    except DeviceError as error:
        raise _foreign(stage, error.problem) from error
    for name, value in plain.items():
        leads_away = name in ("", ".", "..") or "\0" in name or Path(name).name != name
        numbers = value is None or (isinstance(value, list) and [type(part) for part in value] == [int, int])
        if leads_away or not numbers:
            raise _foreign(stage, f"{RECORD} is not as edgeq writes it")
    if not plain:
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


def _foreign(stage: Path, why: str) -> OutputError:
    return OutputError(
        f"{stage} is named like what an interrupted run leaves, and is not taken over: {why}",
        "Remove it if it is not yours; else move what is in its folder old back, and remove it then",
    )


try:
    import fcntl
except ImportError:  # Windows: without a lock
    fcntl = None  # type: ignore[assignment]

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


@contextmanager
def alone_in(folder: Path, *, busy: str = "") -> Iterator[None]:
    """Hold the lock of a folder or a file. Programs that are started do not inherit it; it ends with the process.

    A process that holds it and asks for it again waits for itself: nothing inside the block may do so.

    Args:
        busy: what to say, instead of waiting, where another process holds it.

    Raises:
        OutputError: another one does, and `busy` says something.
    """
    try:
        handle = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    except OSError:  # not readable, or not there: what follows says so
        handle = None
    if handle is None:
        yield
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError as error:
            raise OutputError(busy, "Wait until it has ended, or choose another output") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)


def stage_name(path: Path) -> str:
    """Return a fresh name for the private folder next to the output `path`."""
    return f".{path.name[:STEM]}.{secrets.token_hex(8)}.partial"


def identity(path: Path) -> Identity | None:
    """Return the identity of what is at `path`, a link itself and not what it leads to; None where nothing is."""
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
