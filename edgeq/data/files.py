"""Which files a path or pattern stands for: sorted, by kind, with what is ignored counted."""

from __future__ import annotations

import glob
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from edgeq.data.arrays import is_idx
from edgeq.data.images import SUFFIXES as IMAGES
from edgeq.data.patterns import matching_files
from edgeq.data.records import MAX_FILES
from edgeq.data.texts import SUFFIXES as TEXTS
from edgeq.errors import DataError

Kind = Literal["images", "arrays", "pb", "text", "other"]

READABLE = (
    "images (.jpg, .png, .bmp, .webp, .gif, .tif, .ppm), .npy, .npz, IDX files, test_data_set_N/input_M.pb or one .pb"
)
_OWN = ("preprocess.toml",)
_FOLDER_KINDS: tuple[Kind, ...] = ("images", "arrays", "pb")


@dataclass(frozen=True)
class Found:
    """The samples' files.

    Attributes:
        root: the folder that names are relative to.
        files: sorted by their path below `root`.
        kind: what they are.
        ignored: how many other files were passed over.
    """

    root: Path
    files: tuple[Path, ...]
    kind: Kind
    ignored: int


def kind_of(path: Path) -> Kind:
    """What a file is, by its name."""
    suffix = path.suffix.lower()
    if suffix in IMAGES:
        return "images"
    if suffix in (".npy", ".npz") or is_idx(path):
        return "arrays"
    if suffix == ".pb":
        return "pb"
    return "text" if suffix in TEXTS else "other"


def find_files(source: str | Path, pattern: str | None = None, *, paths: bool = False) -> Found:
    """The files behind a path (file or folder, searched in depth) or a pattern with * and ?.

    Args:
        pattern: keep only files whose name matches, as "*.wav".
        paths: any file counts (for a preprocessing that reads paths).

    Raises:
        DataError: nothing there, or several kinds of data in one folder.
    """
    path = Path(source)
    found = check_there(source)
    if found:
        root = Path(os.path.commonpath([p.parent for p in found]))
    else:
        found, root = (_walk(path), path) if path.is_dir() else ([path], path.parent)
    found = [p for p in found if p.name not in _OWN]
    fitting = tuple(p for p in found if pattern is None or p.match(pattern))
    if not fitting and pattern is not None:
        raise DataError(f"{source} holds no file that matches {pattern!r}", "Correct source.pattern")
    if paths and not fitting:
        raise DataError(f"{source} holds no files", "Check the path")
    if paths:
        return Found(root, fitting, "other", len(found) - len(fitting))
    chosen, kind = _by_kind(source, root, fitting)
    return Found(root, chosen, kind, len(found) - len(chosen))


def check_there(source: str | Path) -> list[Path]:
    """The files that a pattern matches; nothing for a file or a folder, which is not looked into.

    Raises:
        DataError: nothing is there.
    """
    path = Path(source)
    if not path.exists() and glob.has_magic(str(source)):
        found = matching_files(str(source))
        if not found:
            raise DataError(f"{source} matches no file", "Correct the pattern")
        return found
    if not path.exists():
        raise DataError(f"{path} does not exist", "Check the path of the data")
    if not path.is_file() and not path.is_dir():
        raise DataError(f"{path} is neither a file nor a folder", f"Give {READABLE}")
    return []


def _walk(folder: Path) -> list[Path]:
    files: list[Path] = []
    # Links wait until the folders of their place are read: a folder that is reached twice keeps its own name.
    starts = [folder]
    entered: set[tuple[int, int]] = set()
    for start in starts:
        for parent, folders, names in os.walk(start, onerror=_refuse):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            known = _identity(parent)
            if known in entered:
                folders.clear()
                continue
            entered.add(known)
            starts.extend(path for name in folders if (path := Path(parent, name)).is_symlink())
            files.extend(Path(parent, name) for name in names if not name.startswith("."))
            if len(files) > MAX_FILES:
                raise DataError(f"{folder} holds over {MAX_FILES} files", "Give a smaller folder")
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _identity(folder: str) -> tuple[int, int]:
    """What is the same for all names of one folder."""
    try:
        known = os.stat(folder)  # noqa: PTH116  # os.walk gives text
    except OSError as error:
        _refuse(error)
    return known.st_dev, known.st_ino


def _refuse(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename} cannot be read: {error.strerror}", "Check the folder and its permissions"
    ) from error


def _by_kind(source: str | Path, root: Path, found: tuple[Path, ...]) -> tuple[tuple[Path, ...], Kind]:
    """The files of the one kind of samples among `found`."""
    if len(found) == 1 and Path(source).is_file():
        return found, kind_of(found[0])
    counts = Counter(kind_of(path) for path in found)
    kinds = [kind for kind in _FOLDER_KINDS if counts[kind]]
    if not kinds:
        other = f" ({len(found)} other files)" if found else ""
        raise DataError(f"{source} holds no samples{other}", f"Put there {READABLE}")
    if len(kinds) > 1:
        held = ", ".join(f"{counts[kind]} {kind}" for kind in kinds)
        first = next(path for path in found if kind_of(path) == kinds[0])
        # IDX files may have no suffix, and a pattern of "*" alone would match all kinds.
        nested = "**" if len(first.relative_to(root).parts) > 1 else ""
        one_kind = Path(glob.escape(str(root)), nested, f"*{first.suffix or glob.escape(first.name)}")
        raise DataError(f"{source} holds several kinds of data ({held})", f"Name one kind, as '{one_kind}'")
    return tuple(path for path in found if kind_of(path) == kinds[0]), kinds[0]
