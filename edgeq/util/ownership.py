"""Who wrote a folder's content: only what edgeq wrote, by its content, is ever replaced or removed.

Each kind of folder that edgeq writes has an `Ownership`, which decides on every file in a folder before that folder
is replaced. Whatever it does not recognise is named and kept. Folders without a format of their own carry a marker.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq import __version__
from edgeq.errors import OutputError

MARKER = ".edgeq"
"""The file in a folder that says which kind of folder it is, written before anything else."""
SCHEMA = 1
_MOST_BYTES = 1 << 24

Judge = Callable[[str], bool]
"""Whether edgeq wrote the file at a relative POSIX path; a directory without content has a slash at its end."""


@dataclass(frozen=True)
class Ownership:
    """How one kind of folder is distinguished from all others.

    Attributes:
        title: what messages call it, without an article: "bundle".
        judge: for the content of a folder; None where the folder is not of this kind at all. It reads what is there
            and raises nothing but OSError.
    """

    title: str
    judge: Callable[[Path], Judge | None]
    opaque: frozenset[str] = frozenset()

    def check(self, folder: Path) -> None:
        """Refuse a place that holds anything but what edgeq wrote as this kind. Nothing and an empty folder are fine.

        Raises:
            OutputError: it is a link or a file, holds the working directory, or a file that edgeq did not write.
        """
        if folder.is_symlink():
            raise OutputError(f"{shown(folder)} is a symbolic link", "Name the folder that it points to")
        if not folder.exists():
            return
        if not folder.is_dir():
            raise OutputError(f"{shown(folder)} is a file, not a directory", "Choose another output")
        if folder.samefile(Path.cwd()) or folder.resolve() in Path.cwd().parents:
            raise OutputError(f"{shown(folder)} holds the working directory", "Choose another output")
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
                f"{shown(folder)} holds files and is no {self.title}", "Choose another output, or remove it yourself"
            )
        foreign = next((name for name, plain in content(folder, self.opaque) if not plain or not judge(name)), None)
        if foreign is not None:
            raise OutputError(
                f"{shown(folder)} holds {shown(foreign)}, which edgeq did not write",
                "Move it, or choose another output",
            )

    def remove(self, folder: Path) -> str | None:
        """Remove what edgeq wrote in `folder`, and the folder if nothing else is in it.

        Returns:
            a file that was kept because edgeq did not write it; None where there is none.
        """
        if folder.is_symlink() or not folder.is_dir():
            return folder.name if folder.exists() else None
        judge = self.judge(folder)
        if judge is None:
            return next((name for name, _ in content(folder)), None)
        # All are judged first: what is judged by another file must not lose that one before.
        found = [(name, plain and judge(name)) for name, plain in content(folder, self.opaque)]
        for name in (name for name, ours in found if ours and not name.endswith("/")):
            (folder / name).unlink(missing_ok=True)
        for name in sorted({str(Path(name).parent) if name[-1] != "/" else name for name, ours in found if ours}):
            _remove_empty(folder, folder / name)
        _remove_empty(folder, folder)
        return next((name for name, ours in found if not ours), None)


def content(folder: Path, opaque: Collection[str] = ()) -> Iterator[tuple[str, bool]]:
    """Relative POSIX path of each file under `folder`, and whether it is a regular one. No link is followed.

    Sorted, files of a folder before its folders. An empty directory, and one of `opaque`, comes with a slash at
    the end of its path.
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
    """Mark `folder` as one that edgeq writes, unless it is marked already.

    Args:
        kind: of folder.
        files: relative path → sha256 of all that edgeq wrote in it, where that is known.
    """
    marker = {"kind": kind, "schema": SCHEMA, "edgeq": __version__, **({} if files is None else {"files": dict(files)})}
    place = folder / MARKER
    if is_plain(place) and not place.stat().st_size:
        place.unlink()
    if not place.exists():
        with place.open("x", encoding="utf-8") as stream:
            stream.write(json.dumps(marker, indent=1) + "\n")


def read_marker(folder: Path, kind: str) -> Mapping[str, Any] | None:
    """The marker in `folder`; None where there is none, or one of another kind or schema."""
    marker = read_object(folder / MARKER)
    return marker if marker is not None and (marker.get("kind"), marker.get("schema")) == (kind, SCHEMA) else None


def is_marker(folder: Path, kind: str) -> bool:
    """Whether the marker in `folder` is of this kind. An empty one counts: a run was killed while it wrote that."""
    place = folder / MARKER
    return is_plain(place) and (not place.stat().st_size or read_marker(folder, kind) is not None)


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a regular file; None where there is no such file, or something else in it."""
    if not is_plain(path) or path.lstat().st_size > _MOST_BYTES:
        return None
    try:
        plain = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return plain if isinstance(plain, dict) else None


def is_plain(path: Path) -> bool:
    """Whether `path` is a regular file, and no link to one."""
    return not path.is_symlink() and path.is_file()


def as_listed(folder: Path, files: Mapping[str, str], name: str) -> bool:
    """Whether the file `name` in `folder` has the sha256 that `files` gives it."""
    return name in files and is_plain(folder / name) and sha256(folder / name) == files[name]


def sha256(path: Path) -> str:
    """The hash of a file's content in lower-case hex.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def shown(name: str | Path) -> str:
    """A name as one line of plain text."""
    text = str(name)
    return text if text.isprintable() else ascii(text)


def _remove_empty(top: Path, folder: Path) -> None:
    """Remove `folder` and its parents up to `top`, as far as they are empty."""
    while folder == top or top in folder.parents:
        if folder.is_dir() and not folder.is_symlink():
            if any(folder.iterdir()):
                return
            folder.rmdir()
        if folder == top:
            return
        folder = folder.parent
