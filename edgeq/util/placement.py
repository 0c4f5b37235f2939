"""Move several files as one step, undo the moves of a killed run, and lock a folder.

An output has a private folder next to it. In that folder, `new/` contains the files that were written, and `old/` the
files that they replace. `placing.json` exists while files are being moved. This record is written first, so the next
run can undo the moves of a killed run. All old files are moved away before any new file is moved in. The old output
itself is moved away first. So no process ever reads a model with the data of another model.

edgeq trusts a private folder of a killed run only if a run of this user can have made it. Another user could leave a
folder with a forged record. If the folder's `old` were a link, moving files "back" by that record could move files from
anywhere on the disk. So the folder itself, `new` and `old` must be real folders of this user that nobody else can
write. The record may name only the output and the files that accompany it. A new file is moved back only if `proof/`
contains a hard link to it.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from edgeq_device.errors import DeviceError
from edgeq_device.system.files import open_file, read_file
from edgeq_device.system.places import NO_LOCKS, is_stage
from edgeq_device.system.plainjson import MAX_BYTES, parse_json
from edgeq_device.system.renaming import move_new

from edgeq.errors import OutputError

NEW, OLD, PROOF, RECORD = "new", "old", "proof", "placing.json"


def stages(path: Path) -> Sequence[Path]:
    """Return the private folders next to `path` that belong to runs in progress or to killed runs."""
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in entries if is_stage(entry.name, path)]
    except OSError:  # the folder does not exist, or cannot be read
        return ()
    return [path.parent / name for name in sorted(names)]


def is_open(stage: Path) -> bool:
    """Return whether moves out of the private folder `stage` are in progress or were interrupted."""
    return os.path.lexists(stage / RECORD)


def is_interrupted(path: Path) -> bool:
    """Return whether moves to `path` are in progress or were interrupted."""
    return any(map(is_open, stages(path)))


def check_own(stage: Path) -> None:
    """Refuse a private folder that cannot come from a run of this user.

    Raises:
        OutputError: the folder or a folder in it is a link, belongs to somebody else, or can be written by others.
    """
    for place in (stage, stage / NEW, stage / OLD, stage / PROOF):
        try:
            status = place.lstat()
        except FileNotFoundError:  # not created yet, or already removed
            continue
        _check_mine(stage, place, status)
        if not stat.S_ISDIR(status.st_mode):
            raise _foreign(stage, f"{place.name} is a link or not a folder")
    if os.name == "posix" and stage.lstat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _foreign(stage, "others can write into it")


def read_record(stage: Path, output: str | None) -> dict[str, FileIdentity | None]:
    """Return the files that the record in `stage` lists, with the proof of each new file. A file that is only removed
    has None.

    Args:
        output: name of the output, which is moved last; None if the record is for all files of a folder, which may have
            any names.

    Raises:
        OutputError: `check_own` refuses the folder, or the record is damaged or names a file that does not belong to
            the output.
    """
    check_own(stage)
    record = stage / RECORD
    status = record.lstat()
    _check_mine(stage, record, status)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
        raise _foreign(stage, f"{RECORD} is not a small file")
    try:
        content = parse_json(read_file(record), RECORD)
    except DeviceError as error:
        raise _foreign(stage, error.problem) from error
    for name, value in content.items():
        leads_away = name in ("", ".", "..") or "\0" in name or Path(name).name != name
        if leads_away or not (value is None or _is_proof(value)):
            raise _foreign(stage, f"{RECORD} does not have edgeq's format")
    if not content:
        raise _foreign(stage, f"{RECORD} does not have edgeq's format")
    drafts = {name: None if value is None else FileIdentity(*value) for name, value in content.items()}
    if output is not None:
        _check_names(stage, list(drafts), output)
    return drafts


def names_sibling(path: Path, sibling: str) -> bool:
    """Return whether the bytes of the file at `path` contain the name `sibling`."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with open_file(path) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return mapped.find(os.fsencode(sibling)) >= 0


def _check_names(stage: Path, drafts: Sequence[str], output: str) -> None:
    """Refuse a record whose last name is not the output, or whose other names are not companions of the output.

    A companion is a file that is named after the output (`model.*` for `model.onnx`), or a file that the output names,
    as a model names its external data.
    """
    if drafts[-1] != output:
        raise _foreign(stage, f"{RECORD} is of another output")
    for name in drafts[:-1]:
        is_sibling = name.startswith(f"{Path(output).stem}.")
        named = not name.startswith(".") and any(
            place.is_file() and not place.is_symlink() and names_sibling(place, name)
            for place in (stage / NEW / output, stage / OLD / output, stage.parent / output)
        )
        modes = [place.lstat().st_mode for place in (stage / NEW / name, stage / OLD / name) if os.path.lexists(place)]
        if not (is_sibling or named) or not all(map(stat.S_ISREG, modes)):
            raise _foreign(stage, f"{RECORD} names {name!r}, which does not belong to {output}")


def _check_mine(stage: Path, place: Path, status: os.stat_result) -> None:
    if os.name == "posix" and status.st_uid != os.geteuid():
        raise _foreign(stage, f"{place.name} belongs to another user")


def _foreign(stage: Path, why: str) -> OutputError:
    return OutputError(
        f"{stage} is named like the folder of an interrupted run, but edgeq did not leave it: {why}",
        "Remove it if it is not yours. Otherwise move the files in its folder old back first",
    )


try:
    import fcntl
except ImportError:  # on Windows, edgeq works without a lock
    fcntl = None  # type: ignore[assignment]


@contextmanager
def alone_in(folder: Path, *, busy: str = "") -> Iterator[None]:
    """Hold the lock of a folder or file during the `with` block. Child processes do not inherit the lock, and it ends
    with the process.

    Do not lock the same path again inside the block, because the process would wait for itself.

    Args:
        busy: message of the error that is raised if another process holds the lock; "" waits instead.

    Raises:
        OutputError: another process holds the lock, and `busy` is not empty.
    """
    try:
        handle = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    except OSError:  # the path cannot be read or does not exist; the next operation reports that
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
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True)
class FileIdentity:
    """Show that a file is the one that a run wrote, wherever it was moved.

    A hard link in the folder PROOF is a second name of the file's content, so no file that the user writes later can
    pass for it. For a folder, the link is to a file in it.

    Attributes:
        link: random name of the hard link.
        inside: path of the linked file in the folder, or "" if the link is to the file itself.
    """

    link: str
    inside: str

    @classmethod
    def of(cls, stage: Path, path: Path) -> FileIdentity:
        """Make the proof of the file or folder `path` in the private folder `stage`. If the file system has no hard
        links, or if the folder contains no files, no file will have this proof.
        """
        inside = ""
        if path.is_dir() and not path.is_symlink():
            files = (file for file in sorted(path.rglob("*")) if file.is_file() and not file.is_symlink())
            inside = next((file.relative_to(path).as_posix() for file in files), "")
        proof = cls(secrets.token_hex(16), inside)
        try:
            # Windows has only the form that follows links.
            os.link(path / inside, stage / PROOF / proof.link, follow_symlinks=os.name == "nt")
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        return proof

    def holds(self, stage: Path, path: Path) -> bool:
        """Return whether `path` is the file or folder of which this is the proof."""
        try:
            return os.path.samestat((path / self.inside).lstat(), (stage / PROOF / self.link).lstat())
        except OSError:  # one of them does not exist
            return False


_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL, errno.EACCES)


def _is_proof(value: Any) -> bool:
    """Return whether a value of a record has the form of a proof, whose names lead out of no folder."""
    if not isinstance(value, list) or [type(part) for part in value] != [str, str]:
        return False
    link, inside = value
    parts = PurePosixPath(inside).parts
    return re.fullmatch("[0-9a-f]{32}", link) is not None and ".." not in parts and not inside.startswith("/")


def place(
    stage: Path,
    folder: Path,
    names: Sequence[str],
    check: Callable[[Path], None] = lambda old: None,
    *,
    force: bool,
    gone: Iterable[str] = (),
) -> None:
    """Move all of `names` from `stage`/new into `folder`, or none of them.

    Args:
        names: names of the files to move, with the output itself last.
        check: function that checks each file after its move to `stage`/old. If it raises, all moves are undone.
        force: whether to move existing files with these names to `stage`/old.
        gone: names of other files to move to `stage`/old.

    Raises:
        FileExistsError: a file with one of the names exists, or appeared in the meantime.
    """
    for entry_name in (OLD, PROOF):
        (stage / entry_name).mkdir()
    drafts = {**dict.fromkeys(gone), **{name: FileIdentity.of(stage, stage / NEW / name) for name in names}}
    # First the record: without it, the next run could not undo the moves.
    _write(stage, drafts)
    moved: set[str] = set()
    try:
        # The output comes first, so that nobody reads it with files of another output.
        for name in reversed(drafts):
            if force and os.path.lexists(folder / name):
                _move_away(folder / name, stage / OLD / name)
                check(stage / OLD / name)
        for name in names:
            move_new(stage / NEW / name, folder / name)
            moved.add(name)
    except BaseException:
        _undo(stage, folder, drafts, moved)
        raise
    (stage / RECORD).unlink()


def _move_away(source: Path, place: Path) -> None:
    """Move `source` to `place`. A folder in a lower layer of an overlay file system cannot be renamed, so it is copied
    first and then removed.
    """
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
    """Complete or undo the moves to `path` that a killed run began. The output itself is moved last. If it is in place,
    so are all other files, and only the private folder is removed. Otherwise, the moves are undone.

    Call this only while no other process works in the folder.

    Args:
        filled: whether the output is the folder that contains `path`. Its files are moved into it one by one.

    Raises:
        OutputError: a file is in the way, or a private folder was not left by a run of this user.
    """
    for stage in filter(is_open, stages(path)):
        drafts = read_record(stage, None if filled else path.name)
        last_name, proof = next(reversed(drafts.items()))
        if proof is None or not proof.holds(stage, path.parent / last_name):
            try:
                _undo(stage, path.parent, drafts)
            except FileExistsError as error:
                raise OutputError(
                    f"{error.filename} is in the way: an interrupted run must put a file back there from {stage / OLD}",
                    "Move it, or move the files in that folder back yourself and remove the folder",
                ) from error
        shutil.rmtree(stage, ignore_errors=True)


def _undo(stage: Path, folder: Path, drafts: dict[str, FileIdentity | None], moved: Collection[str] = ()) -> None:
    """Move the new files back to `stage`/new, and then the old files back to `folder`.

    Args:
        moved: names of new files that this process has moved, which needs no proof.
    """
    for name, proof in reversed(drafts.items()):
        ours = name in moved and os.path.lexists(folder / name)
        if proof is None or not (ours or proof.holds(stage, folder / name)):
            continue
        draft = stage / NEW / name
        if not os.path.lexists(draft):
            os.replace(folder / name, draft)
        # The move used a hard link and was interrupted between its two steps.
        elif os.path.samestat(draft.lstat(), (folder / name).lstat()):
            (folder / name).unlink()
    for name in drafts:
        if os.path.lexists(stage / OLD / name):
            move_new(stage / OLD / name, folder / name)
    (stage / RECORD).unlink()


def _write(stage: Path, drafts: dict[str, FileIdentity | None]) -> None:
    draft = stage / f"{RECORD}.draft"
    record = {name: None if proof is None else [proof.link, proof.inside] for name, proof in drafts.items()}
    draft.write_text(json.dumps(record), "utf-8")
    # A renamed file is complete, so no run ever reads half a record.
    os.replace(draft, stage / RECORD)
