"""Tell the files that edgeq wrote into a folder from files of the user.

Each kind of folder that edgeq writes has an `Ownership`. Before edgeq replaces a folder, it checks every file in the
folder. If there is a file that edgeq did not write, edgeq refuses to replace the folder and names the file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeq.errors import OutputError

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
            raise OutputError(f"{printable_path(folder)} is a symbolic link", "Name the folder that it points to")
        if not folder.exists():
            return
        if not folder.is_dir():
            raise OutputError(f"{printable_path(folder)} is a file, not a directory", "Choose another output")
        # Replacing such a folder would leave the user's shell in a folder that no longer exists.
        if folder.samefile(Path.cwd()) or folder.resolve() in Path.cwd().parents:
            raise OutputError(f"{printable_path(folder)} contains the working directory", "Choose another output")
        try:
            self._check_content(folder)
        except OSError as error:
            raise OutputError(
                f"{printable_path(folder)} cannot be read: {error.strerror}", "Choose another output"
            ) from error

    def _check_content(self, folder: Path) -> None:
        with os.scandir(folder) as entries:
            if next(entries, None) is None:
                return
        judge = self.judge(folder)
        if judge is None:
            raise OutputError(
                f"{printable_path(folder)} contains files and is not a {self.title}",
                "Choose another output, or remove it yourself",
            )
        foreign = next(
            (name for name, is_regular in content(folder, self.opaque) if not is_regular or not judge(name)), None
        )
        if foreign is not None:
            raise OutputError(
                f"{printable_path(folder)} contains {printable_path(foreign)}, which edgeq did not write",
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
        entries = [(name, is_regular and judge(name)) for name, is_regular in content(folder, self.opaque)]
        for name in (name for name, ours in entries if ours and not name.endswith("/")):
            (folder / name).unlink(missing_ok=True)
        for name in sorted({str(Path(name).parent) if name[-1] != "/" else name for name, ours in entries if ours}):
            _remove_empty(folder, folder / name)
        _remove_empty(folder, folder)
        return next((name for name, ours in entries if not ours), None)


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
        # A link may lead out of the folder, so it counts as a file that edgeq did not write.
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            folders.append(entry.name)
        else:
            yield entry.name, stat.S_ISREG(mode)
    for name in folders:
        inner = None
        for inner, is_regular in content(folder / name) if name not in opaque else ():
            yield f"{name}/{inner}", is_regular
        if inner is None:
            yield f"{name}/", True


def printable_path(name: str | Path) -> str:
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
