"""Write outputs that appear complete or not at all, and replace only files that edgeq wrote.

An output is first written next to its destination, and then moved there. Each kind of folder that edgeq writes has an
`Ownership`. Before edgeq replaces a folder, it checks every file in the folder. If there is a file that edgeq did not
write, edgeq refuses to replace the folder and names the file. Folders that have no format of their own contain a
marker.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from edgeq_device.system.files import open_file, read_file
from edgeq_device.system.places import PrivateFolder, exchange, move_new, remove_ended, stage_name

from edgeq import __version__
from edgeq.errors import OutputError, UsageError
from edgeq.util import placement
from edgeq.util.in_memory import is_in_memory
from edgeq.util.placement import NEW, alone_in

MARKER = ".edgeq"
"""The file that names the kind of the folder that it is in. edgeq writes this file before all others."""
SCHEMA = 1
_MOST_BYTES = 1 << 24

Judge = Callable[[str], bool]
"""Return whether edgeq wrote the file at a relative POSIX path. The path of an empty directory ends with a slash."""


@dataclass(frozen=True)
class Ownership:
    """Describe how to recognise one kind of folder.

    Attributes:
        title: name of the kind in messages, without an article: "bundle".
        judge: function that reads a folder and returns a `Judge` for its files, or None if the folder is not of this
            kind. The function raises only OSError.
        opaque: names of its subfolders that are judged as a whole.
    """

    title: str
    judge: Callable[[Path], Judge | None]
    opaque: frozenset[str] = frozenset()

    def check(self, folder: Path) -> None:
        """Refuse a folder that contains something other than what edgeq writes into this kind of folder. A missing or
        empty folder is fine.

        Raises:
            OutputError: `folder` is a link or a file, or contains the working directory or a file that edgeq did not
                write.
        """
        if folder.is_symlink():
            raise OutputError(f"{shown(folder)} is a symbolic link", "Name the folder that it points to")
        if not folder.exists():
            return
        if not folder.is_dir():
            raise OutputError(f"{shown(folder)} is a file, not a directory", "Choose another output")
        if folder.samefile(Path.cwd()) or folder.resolve() in Path.cwd().parents:
            raise OutputError(f"{shown(folder)} contains the working directory", "Choose another output")
        try:
            self._check_content(folder)
        except OSError as error:
            raise OutputError(f"{shown(folder)} cannot be read: {error.strerror}", "Choose another output") from error

    def _check_content(self, folder: Path) -> None:
        with os.scandir(folder) as entries:
            if next(entries, None) is None:
                return
        judge = self.judge(folder)
        if judge is None:
            raise OutputError(
                f"{shown(folder)} contains files and is not a {self.title}",
                "Choose another output, or remove it yourself",
            )
        foreign = next((name for name, plain in content(folder, self.opaque) if not plain or not judge(name)), None)
        if foreign is not None:
            raise OutputError(
                f"{shown(folder)} contains {shown(foreign)}, which edgeq did not write",
                "Move it, or choose another output",
            )

    def remove(self, folder: Path) -> str | None:
        """Remove the files in `folder` that edgeq wrote, and then the folder itself if it is empty.

        Returns:
            The name of a file that was kept because edgeq did not write it, or None if there is no such file.
        """
        if folder.is_symlink() or not folder.is_dir():
            return folder.name if folder.exists() else None
        judge = self.judge(folder)
        if judge is None:
            return next((name for name, _ in content(folder)), None)
        # Judge all files before removing any, because `judge` may need other files to judge one.
        found = [(name, plain and judge(name)) for name, plain in content(folder, self.opaque)]
        for name in (name for name, ours in found if ours and not name.endswith("/")):
            (folder / name).unlink(missing_ok=True)
        for name in sorted({str(Path(name).parent) if name[-1] != "/" else name for name, ours in found if ours}):
            _remove_empty(folder, folder / name)
        _remove_empty(folder, folder)
        return next((name for name, ours in found if not ours), None)


def content(folder: Path, opaque: Collection[str] = ()) -> Iterator[tuple[str, bool]]:
    """Yield the relative POSIX path of each file under `folder`, and whether it is a regular file. Links are not
    followed.

    The paths are sorted, and the files of a folder come before its subfolders. For an empty folder or a folder in
    `opaque`, one path that ends with a slash is yielded.
    """
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    folders = []
    for entry in listed:
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            folders.append(entry.name)
        else:
            yield entry.name, stat.S_ISREG(mode)
    for name in folders:
        inner = None
        for inner, plain in content(folder / name) if name not in opaque else ():
            yield f"{name}/{inner}", plain
        if inner is None:
            yield f"{name}/", True


def write_marker(folder: Path, kind: str, files: Mapping[str, str] | None = None) -> None:
    """Mark `folder` as written by edgeq, unless it already has a marker.

    Args:
        kind: kind of folder.
        files: sha256 of each file that edgeq wrote in the folder, by relative path, if known.
    """
    marker = {"kind": kind, "schema": SCHEMA, "edgeq": __version__, **({} if files is None else {"files": dict(files)})}
    place = folder / MARKER
    if is_plain(place) and not place.stat().st_size:
        place.unlink()
    if not place.exists():
        with place.open("x", encoding="utf-8") as stream:
            stream.write(json.dumps(marker, indent=1) + "\n")


def read_marker(folder: Path, kind: str) -> Mapping[str, Any] | None:
    """Return the contents of the marker in `folder`. Return None if there is no marker, or if its kind or schema
    differs.
    """
    marker = read_object(folder / MARKER)
    return marker if marker is not None and (marker.get("kind"), marker.get("schema")) == (kind, SCHEMA) else None


def is_marker(folder: Path, kind: str) -> bool:
    """Return whether `folder` has a marker of this kind. An empty marker counts, because a run may be killed while
    writing it.
    """
    place = folder / MARKER
    return is_plain(place) and (not place.stat().st_size or read_marker(folder, kind) is not None)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a regular file, or None if there is no such file or it contains something else."""
    if not is_plain(path) or path.lstat().st_size > _MOST_BYTES:
        return None
    try:
        plain = json.loads(read_file(path))
    except (ValueError, RecursionError):
        return None
    return plain if isinstance(plain, dict) else None


def is_plain(path: Path) -> bool:
    """Return whether `path` is a regular file and not a link."""
    return not path.is_symlink() and path.is_file()


def as_listed(folder: Path, files: Mapping[str, str], name: str) -> bool:
    """Return whether the file `name` in `folder` has the sha256 that `files` lists for it."""
    return name in files and is_plain(folder / name) and sha256(folder / name) == files[name]


def sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file's content in lower-case hex.

    Raises:
        OSError: the file cannot be read.
    """
    with open_file(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def shown(name: str | Path) -> str:
    """Return a file name or path as one line of plain text."""
    text = str(name)
    return text if text.isprintable() else ascii(text)


def _remove_empty(top: Path, folder: Path) -> None:
    """Remove `folder` and then its parents up to `top`. Stop at the first one that is not empty."""
    while folder == top or top in folder.parents:
        if folder.is_dir() and not folder.is_symlink():
            if any(folder.iterdir()):
                return
            folder.rmdir()
        if folder == top:
            return
        folder = folder.parent


Kind = Literal["file", "directory"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOUNTS = Path("/proc/self/mountinfo")
_LAST = ("manifest.json", ".edgeq")
"""Files that are moved last when a folder is filled in place, because they show that all other files are there."""
_ROOM = 1 << 20
"""Free space, in bytes, below which a file system counts as full."""
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.EFBIG)


def check_free(path: Path, *, force: bool, kind: Kind | None = None) -> None:
    """Refuse `path` if it exists and `force` is not set, or if it cannot be written. edgeq calls this before it starts
    hours of work.

    If a run to `path` was killed, `recover` first removes its files. If the run was moving its output, `recover`
    completes or undoes the move.

    Args:
        kind: kind of output that will be written. Even with `force`, a directory never replaces a file, and a file
            never replaces a directory.
    """
    if str(path) in ("-", "."):
        raise OutputError(f"{str(path)!r} is not an output", "Name a file or a directory of its own")
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise OutputError(f"the name {path.name!r} is not UTF-8", "Choose another output") from None
    recover(path)
    _check_free(path, force=force, kind=kind)


def recover(path: Path) -> None:
    """Remove the private folders of killed runs to `path`. If a run was killed while it moved its output, complete or
    undo the move.

    Raises:
        OutputError: something else is in the way, or the files at `path` do not come from a run of this user.
    """
    if placement.interrupted(path):
        with alone_in(path.parent):
            placement.settle(path)
    inside = path / path.name
    if any(placement.stages(inside)) and not path.is_symlink():  # private folders of an output that fills a mount point
        with alone_in(path.parent):
            placement.settle(inside, filled=True)
    for folder in {path, path.parent, work_folder() or path.parent}:
        remove_ended(folder / path.name, placement.is_open)


def _check_free(path: Path, *, force: bool, kind: Kind | None) -> None:
    try:
        _check_place(path, force=force, kind=kind)
    except OSError as error:
        raise _unwritable(path, error) from error


def check_apart(path: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that would replace an input: the input file itself, or a directory that contains it."""
    place = path.resolve()
    for source in inputs:
        found = source.resolve()
        same = found == place or _same(path, source)
        if same or place in found.parents:
            what = "is" if same else "contains"
            raise OutputError(f"{path} {what} the input {source}", "Choose another output: inputs are never replaced")


def check_outside(path: Path, folders: Iterable[Path]) -> None:
    """Refuse an output inside an input folder. Entries of `folders` that are not folders are ignored."""
    for folder in folders:
        if folder.is_dir() and folder.resolve() in path.resolve().parents:
            raise OutputError(f"{path} is inside the input folder {folder}", "Choose another output")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist, or cannot be accessed
        return False


def _check_place(path: Path, *, force: bool, kind: Kind | None) -> None:
    if kind == "file" and path.is_dir():
        raise OutputError(f"{path} is a directory", "Name a file in it")
    if kind == "directory" and path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file, not a directory", "Choose another output")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OutputError(f"{path} is a device, a pipe or a socket", "Name a file: those are never replaced")
    # A link to a missing file also counts as existing.
    mounted = kind == "directory" and _is_mount(path)
    if (path.exists() or path.is_symlink()) and not force and not (mounted and not any(path.iterdir())):
        raise _taken(path)
    parent = path if mounted else nearest_parent(path)
    if not parent.is_dir():
        raise OutputError(f"{parent} is not a directory", "Choose another output")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is not writable", "Choose another output, or change its permissions")


def next_to(model: Path, ending: str) -> Path:
    """Return the default path of an output. It is next to `model` and has the model's name and `ending`, such as
    ".int8.onnx".

    Raises:
        UsageError: the model is in memory, so it is in no folder.
    """
    if is_in_memory(model):
        raise UsageError("a model in memory has no folder to write into", "Name the ⟨output⟩")
    return model.with_name(f"{model.stem}{ending}")


def nearest_parent(path: Path) -> Path:
    """Return the closest ancestor of `path` that exists."""
    return next(p for p in path.absolute().parents if p.exists() or p.is_symlink())


def _only_empty(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise OutputError(f"{folder} contains files", "Choose another output, or remove it yourself")


@contextmanager
def output_file(
    path: Path, *, force: bool = False, ours: Callable[[Path], bool] = lambda sibling: False, beside: Iterable[str] = ()
) -> Iterator[Path]:
    """Yield a temporary path in a private folder next to `path`. On success, move the file written there to `path`.

    If the writer leaves other files in that folder, such as external data, they are moved first. With `force`, such a
    sibling replaces an existing file only if the old file at `path` names the existing file, as a model names its
    external data, or if `ours` recognises the existing file. All other files stay, because the user named only `path`.

    Args:
        beside: names of possible siblings. Their paths are also checked before anything is written.

    Raises:
        OutputError: a file exists and `force` is not set, even if another process wrote the file in the meantime.
    """
    with _staging(path, force=force, kind="file") as stage:
        for name in beside:
            _check_sibling(path, path.parent / name, force=force, ours=ours)
        yield stage / NEW / path.name
        with alone_in(path.parent):
            _check_free(path, force=force, kind="file")
            names = [*sorted(p.name for p in (stage / NEW).iterdir() if p.name != path.name), path.name]
            for place in (path.parent / name for name in names[:-1]):
                _check_sibling(path, place, force=force, ours=ours)
            if len(names) > 1:
                placement.place(stage, path.parent, names, force=force)
            elif force:
                os.replace(stage / NEW / path.name, path)
            else:
                move_new(stage / NEW / path.name, path)


def _check_sibling(path: Path, place: Path, *, force: bool, ours: Callable[[Path], bool]) -> None:
    """Refuse the path `place`, which is next to `path`, if the file there does not belong to `path`."""
    if place.is_dir():
        raise OutputError(
            f"{place} is a directory, but data of {path.name} must go there", "Move it, or choose another output"
        )
    if place.is_symlink() or (place.is_file() and not (placement.names(path, place.name) or ours(place))):
        raise OutputError(f"{place} exists and does not belong to {path.name}", "Move it, or choose another output")
    _check_free(place, force=force, kind="file")


@contextmanager
def output_directory(path: Path, *, force: bool = False, check: Callable[[Path], None] = _only_empty) -> Iterator[Path]:
    """Yield a temporary directory next to `path`, and rename it to `path` on success. Only then remove an old
    directory.

    Args:
        check: function that raises OutputError if the old directory contains files that must not be replaced. It is
            called before anything is written. Hours may pass, so it is called again before the old directory is
            removed.

    Raises:
        OutputError: `path` exists and `force` is not set, even if another process made it in the meantime.
    """
    if force:
        check(path)
    with _staging(path, force=force, kind="directory") as stage:
        draft = stage / NEW / path.name
        draft.mkdir()
        yield draft
        with alone_in(path.parent):
            _check_free(path, force=force, kind="directory")
            check(path)
            if _is_mount(path):
                _fill(path, draft)
            elif not force or not os.path.lexists(path):
                move_new(draft, path)
            elif not _exchanged(draft, path, check):
                checked = partial(_check_moved, path=path, check=check)
                placement.place(stage, path.parent, [path.name], checked, force=True)


def _is_mount(path: Path) -> bool:
    """Return whether a folder is a mount point, as it can be in containers. A mount point cannot be renamed."""
    if not path.is_dir() or path.is_symlink():
        return False
    if os.path.ismount(path):
        return True
    try:  # a bind mount, which is a folder of the same file system, mounted a second time
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:  # not Linux, or no /proc
        return False
    place = os.fsencode(path.resolve())
    return any(re.sub(rb"\\([0-7]{3})", lambda o: bytes([int(o[1], 8)]), line.split()[4]) == place for line in lines)


def _fill(path: Path, draft: Path) -> None:
    """Replace everything in the folder `path` with the content of `draft`, completely or not at all."""
    old = [entry.name for entry in path.iterdir()]
    folder = PrivateFolder(path / stage_name(path))
    stage = folder.path
    try:
        folder.create()
        shutil.copytree(draft, stage / NEW, symlinks=True)
        names = sorted((entry.name for entry in draft.iterdir()), key=lambda name: (name in _LAST, name))
        placement.place(stage, path, names, force=True, gone=[name for name in old if name not in names])
    finally:
        _remove(folder, [])


def _exchanged(draft: Path, path: Path, check: Callable[[Path], None]) -> bool:
    """Exchange `draft` and `path` in one step, and return True. Afterwards, `draft` contains the old content of `path`.
    Return False if the system cannot exchange them.
    """
    new = draft.lstat()
    try:
        try:
            done = exchange(draft, path)
        except OSError as error:
            if error.errno != errno.EXDEV:  # a folder in a lower layer of an overlay file system cannot be renamed
                raise
            done = False
        if done:
            # Files that appeared in the folder between the first check and the exchange were moved with it, so check
            # again.
            _check_moved(draft, path, check)
    except BaseException:
        if os.path.lexists(path) and os.path.samestat(path.lstat(), new):
            exchange(draft, path)
        raise
    return done


def _check_moved(old: Path, path: Path, check: Callable[[Path], None]) -> None:
    """Run `check` on `old`, the content that was moved away from `path`, but name `path` in its error messages."""
    try:
        check(old)
    except OutputError as error:
        raise OutputError(error.problem.replace(str(old), str(path)), error.fix) from error


@contextmanager
def _staging(path: Path, *, force: bool, kind: Kind) -> Iterator[Path]:
    check_free(path, force=force, kind=kind)
    # Choose the name before making the folder. Otherwise a signal between the two steps could leave the folder behind.
    folder = PrivateFolder(_beside(path, kind) / stage_name(path))
    stage = folder.path
    parents: list[Path] = []
    try:
        try:
            for parent in reversed([p for p in path.absolute().parents if not p.exists()]):
                parents.append(parent)
                parent.mkdir(exist_ok=True)
            folder.create()
        except FileNotFoundError as error:  # making a new folder in /proc raises this error
            raise _unwritable(path, error) from error
        (stage / NEW).mkdir()
        yield stage
    except OSError as error:
        if isinstance(error, FileExistsError) and error.filename is not None:
            taken = Path(os.fsdecode(error.filename))
            if taken.parent == path.parent:
                raise _taken(taken) from error
        if error.errno in _FULL:
            raise _full(path) from error
        if error.errno == errno.EBUSY and kind == "file":
            fix = "Mount its folder, and name a file in it"
            raise OutputError(f"{path} is a mount point, which cannot be replaced", fix) from error
        named = Path(os.fsdecode(error.filename)).absolute() if error.filename is not None else None
        if error.errno in _REFUSED and (named is None or path.absolute().parent in named.parents):
            raise _unwritable(path, error) from error
        raise
    finally:
        try:
            _remove(folder, parents)
        except (KeyboardInterrupt, SystemExit):  # a signal during the cleanup: finish the cleanup first
            _remove(folder, parents)
            raise


def _beside(path: Path, kind: Kind) -> Path:
    """Return the folder in which to make an output's private folder.

    This is the parent of `path`. If `path` is a mount point whose parent cannot be written, it is the folder for work
    files.
    """
    work = work_folder()
    if kind == "directory" and work is not None and _is_mount(path) and not os.access(path.parent, os.W_OK):
        return work
    return path.parent


def _remove(folder: PrivateFolder, parents: list[Path]) -> None:
    """Remove the private folder, and remove the parent folders that were made for the output, if they are empty."""
    # If moves were interrupted, the folder still contains files that could not be moved back. The next run moves them.
    if placement.is_open(folder.path):
        folder.release()
    else:
        folder.remove()
    for parent in reversed(parents):
        try:
            parent.rmdir()
        except OSError:  # it contains the output, or files of another process
            return


def _taken(path: Path) -> OutputError:
    return OutputError(f"{path} exists already", "Pass --force to replace it, or choose another output")


def _full(path: Path) -> OutputError:
    """Return an error for a full disk. The error names the output or the work folder, whichever has less space left."""
    places = {nearest_parent(path): f"while writing {path}"}
    work = work_folder()
    if work is not None:
        places[work] = f"in {work} for the work files of {path}"
    fullest = min(places, key=lambda place: shutil.disk_usage(place).free)
    fix = "Free some space and run again"
    return OutputError(f"no space left {places[fullest]}", fix if fullest != work else f"{fix}, or set TMPDIR")


def work_folder() -> Path | None:
    """Return the folder for work files (TMPDIR), or None if no such folder is writable."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None


def is_full(folder: Path) -> bool:
    """Return whether the file system of `folder` has too little space for anything but small files."""
    return shutil.disk_usage(folder).free < _ROOM


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"{path} cannot be written: {error.strerror}", "Choose another output")
