"""Write outputs that appear complete or not at all, and replace only what the user allows.

An output is first written next to its destination, and then moved there. `edgeq.util.ownership` decides which files of
an old folder edgeq may replace.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from edgeq_device.system.places import PrivateFolder, name_stage, remove_ended
from edgeq_device.system.renaming import exchange, move_new

from edgeq.errors import OutputError, UsageError
from edgeq.util import placement
from edgeq.util.in_memory import is_in_memory
from edgeq.util.marker import MARKER
from edgeq.util.placement import NEW, alone_in

Kind = Literal["file", "directory"]

# A full quota has the same remedy as a full disk.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOUNTS = Path("/proc/self/mountinfo")
_LAST = ("manifest.json", MARKER)
"""Files that are moved last when a folder is filled in place, because they show that all other files are there."""
_ROOM = 1 << 20
"""Free space, in bytes, below which a file system counts as full."""
# Errors that mean that the user has to choose another place.
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
    if placement.is_interrupted(path):
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
        resolved = source.resolve()
        is_same = resolved == place or _is_same_file(path, source)
        if is_same or place in resolved.parents:
            relation = "is" if is_same else "contains"
            raise OutputError(
                f"{path} {relation} the input {source}", "Choose another output: inputs are never replaced"
            )


def check_outside(path: Path, folders: Iterable[Path]) -> None:
    """Refuse an output inside an input folder. Entries of `folders` that are not folders are ignored."""
    for folder in folders:
        if folder.is_dir() and folder.resolve() in path.resolve().parents:
            raise OutputError(f"{path} is inside the input folder {folder}", "Choose another output")


def _is_same_file(path: Path, source: Path) -> bool:
    try:
        return path.samefile(source)
    except OSError:  # one of them does not exist, or cannot be accessed
        return False


def _check_place(path: Path, *, force: bool, kind: Kind | None) -> None:
    if kind == "file" and path.is_dir():
        raise OutputError(f"{path} is a directory", "Name a file in it")
    # `force` is permission to replace an output, not to change what kind of thing the path is.
    if kind == "directory" and path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file, not a directory", "Choose another output")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OutputError(f"{path} is a device, a pipe or a socket", "Name a file: those are never replaced")
    # A link to a missing file also counts as existing.
    mounted = kind == "directory" and _is_mount(path)
    if (path.exists() or path.is_symlink()) and not force and not (mounted and not any(path.iterdir())):
        raise _exists_error(path)
    parent = path if mounted else nearest_parent(path)
    if not parent.is_dir():
        raise OutputError(f"{parent} is not a directory", "Choose another output")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is not writable", "Choose another output, or change its permissions")


def default_output(model: Path, ending: str) -> Path:
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
    if place.is_symlink() or (place.is_file() and not (placement.names_sibling(path, place.name) or ours(place))):
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
            elif not _exchange(draft, path, check):
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
    folder = PrivateFolder(path / name_stage(path))
    stage = folder.path
    try:
        folder.create()
        shutil.copytree(draft, stage / NEW, symlinks=True)
        names = sorted((entry.name for entry in draft.iterdir()), key=lambda name: (name in _LAST, name))
        placement.place(stage, path, names, force=True, gone=[name for name in old if name not in names])
    finally:
        _remove(folder, [])


def _exchange(draft: Path, path: Path, check: Callable[[Path], None]) -> bool:
    """Exchange `draft` and `path` in one step, and return True. Afterwards, `draft` contains the old content of `path`.
    Return False if the system cannot exchange them.
    """
    new = draft.lstat()
    try:
        try:
            exchanged = exchange(draft, path)
        except OSError as error:
            if error.errno != errno.EXDEV:  # a folder in a lower layer of an overlay file system cannot be renamed
                raise
            exchanged = False
        if exchanged:
            # Files that appeared in the folder between the first check and the exchange were moved with it, so check
            # again.
            _check_moved(draft, path, check)
    except BaseException:
        if os.path.lexists(path) and os.path.samestat(path.lstat(), new):
            exchange(draft, path)
        raise
    return exchanged


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
    folder = PrivateFolder(_draft_path(path, kind) / name_stage(path))
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
            existing = Path(os.fsdecode(error.filename))
            if existing.parent == path.parent:
                raise _exists_error(existing) from error
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


def _draft_path(path: Path, kind: Kind) -> Path:
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


def _exists_error(path: Path) -> OutputError:
    return OutputError(f"{path} exists already", "Pass ⟨force=True⟩ to replace it, or choose another output")


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
