"""Which files a path or pattern stands for: sorted, by kind, with what is ignored counted."""

from __future__ import annotations

import fnmatch
import glob
import io
import logging
import math
import os
import struct
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NoReturn

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile

from edgeq.data.arrays import is_idx
from edgeq.data.labels import SUFFIXES as TEXTS
from edgeq.data.records import MAX_FILES, MAX_PIXELS, FileList, Picture, Rows, check_size
from edgeq.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
# Plain raster formats only: Pillow would start Ghostscript for an EPS under another name.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
# Pillow logs details of damaged files; without a handler Python would print them beside the one line of the error.
logging.getLogger("PIL").addHandler(logging.NullHandler())
_EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "La", "RGBa", "LAB", "HSV")
_BITS_PER_SAMPLE, _TILE_WIDTH, _TILE_LENGTH = 258, 322, 323  # tags of TIFF
_BYTES_A_PIXEL = 16
"""Bytes that a pixel takes while it is decoded: in Pillow as it is stored and as RGB of 4 bytes, copied, as 3 bytes."""
_OF_A_BYTE = 64
"""Bytes that decoding may take for each byte of the file: photographs have 2 to 20 bits a pixel."""
# What Pillow raises for damaged files.
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, MemoryError, struct.error)


def decode(stream: IO[bytes] | Path, where: str) -> Picture:
    """Decode an image (the first frame) to RGB; transparency is dropped, EXIF rotation is not applied.

    Raises:
        DataError: not an image, damaged, truncated, too large, or of more than 8 bits a channel.
    """
    try:
        held = stream.stat().st_size if isinstance(stream, Path) else stream.seek(0, io.SEEK_END)
        if not isinstance(stream, Path):
            stream.seek(0)
        with warnings.catch_warnings():
            # Pillow warns of large images and odd metadata; size is checked here, and metadata is not used.
            warnings.simplefilter("ignore")
            with Image.open(stream, formats=_FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(
                        f"{where} is an image of {image.width}x{image.height} pixels, more than {MAX_PIXELS}",
                        "Give fewer pixels",
                    )
                check_size(
                    _BYTES_A_PIXEL * _pixels(image),
                    f"{where} is an image of {image.width}x{image.height} pixels in {held} bytes",
                    "Give fewer pixels",
                    held=_OF_A_BYTE * held,
                )
                if image.mode not in _EIGHT_BIT or _is_deep(image):
                    raise DataError(
                        f"{where} is an image whose values are not 8 bits a channel (Pillow's mode {image.mode})",
                        "Convert it, or store it as an array",
                    )
                return Picture(np.asarray(image.convert("RGB")))
    except Image.DecompressionBombError as error:
        raise DataError(f"{where} is an image of more than {MAX_PIXELS} pixels", "Give fewer pixels") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{where} is not an image that can be read", "Replace or remove the file") from error
    except _DAMAGED as error:
        text = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{where} cannot be decoded: {text}", "Replace or remove the file") from error


def _pixels(image: Image.Image) -> int:
    """Return how many pixels the header makes the decoder hold: a tile of TIFF may be larger than its image."""
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    tile = math.prod(tags.get(tag) or 1 for tag in (_TILE_WIDTH, _TILE_LENGTH))
    return max(image.width * image.height, int(tile))


def _is_deep(image: Image.Image) -> bool:
    """Return whether a file holds more than 8 bits a channel where its mode does not show it: Pillow cuts colours to
    8."""
    if isinstance(image, TiffImageFile):
        bits = image.tag_v2.get(_BITS_PER_SAMPLE, (1,))
        return any(size > 8 for size in (bits if isinstance(bits, tuple) else (bits,)))
    for tile in image.tile if isinstance(image, PngImageFile | PpmImageFile) else ():
        # Arguments of the decoders: the layout of PNG's data, as "RGB;16B", and the largest value of PPM.
        for argument in tile.args if isinstance(tile.args, tuple) else (tile.args,):
            if (isinstance(argument, str) and ";16" in argument) or (isinstance(argument, int) and argument > 255):
                return True
    return False


def decode_bytes(data: bytes, where: str) -> Picture:
    """Return an encoded image as uint8 [H, W, 3], red first; `where` names it in messages. See `decode`."""
    return decode(io.BytesIO(data), where)


@dataclass(frozen=True)
class ImageFiles(FileList):
    """A list of image files."""

    rows: Rows = "one"

    def item(self, path: Path) -> Picture:
        """Return the decoded image."""
        return decode(path, str(path))


_ANY_DEPTH = "**"


def matching_files(pattern: str) -> list[Path]:
    """Return the files that `pattern` matches as Python's `glob` understands it, sorted; a file that `**` reaches by
    several paths once, by one without links where there is one.

    Raises:
        DataError: more folders than a data set can have.
    """
    parts = Path(pattern).parts
    if _ANY_DEPTH not in parts:
        return sorted(path for path in map(Path, glob.glob(pattern)) if path.is_file())  # noqa: PTH207  # absolute too
    fixed = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    root, below = Path(*parts[:fixed]), parts[fixed:]
    hidden = any(part.startswith(".") for part in below)
    found = [path for path in _Search(pattern, hidden).files(root, ()) if _fits(path.relative_to(root).parts, below)]
    place = {parent: os.path.realpath(parent) for parent in {path.parent for path in found}}
    found.sort(key=lambda path: (place[path.parent] != os.path.abspath(path.parent), path))  # noqa: PTH100  # links stay
    once: dict[tuple[str, str], Path] = {}
    for path in found:
        once.setdefault((place[path.parent], path.name), path)
    return sorted(once.values())


class _Search:
    """Every file below a folder. Links are followed, but not to a folder that the path came through.

    Args:
        pattern: for messages.
        hidden: whether names that begin with a dot count.
    """

    def __init__(self, pattern: str, hidden: bool) -> None:
        self._pattern, self._hidden = pattern, hidden
        self._entered = 0

    def files(self, folder: Path, above: tuple[str, ...]) -> Iterator[Path]:
        """Yield the files below `folder`, reached through the real paths `above`."""
        real = os.path.realpath(folder)
        if real in above:
            return
        self._entered += 1
        if self._entered > MAX_FILES:
            raise DataError(f"{self._pattern} leads through over {MAX_FILES} folders", "Give a smaller folder")
        try:
            with os.scandir(folder) as entries:
                within = sorted(entries, key=lambda entry: entry.name)
        except OSError:  # as glob has it: what may not be read matches nothing
            return
        for entry in within:
            if entry.name.startswith(".") and not self._hidden:
                continue
            path = folder / entry.name
            known = path if entry.is_symlink() else entry  # an entry knows without another look at the disk
            if known.is_dir():
                yield from self.files(path, (*above, real))
            elif known.is_file():
                yield path


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not names
    first, rest = pattern[0], pattern[1:]
    if first == _ANY_DEPTH:
        return _fits(names, rest) or (bool(names) and not names[0].startswith(".") and _fits(names[1:], pattern))
    if not names or (names[0].startswith(".") and not first.startswith(".")):
        return False
    return fnmatch.fnmatch(names[0], first) and _fits(names[1:], rest)


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
    """Return what a file is, by its name."""
    suffix = path.suffix.lower()
    if suffix in SUFFIXES:
        return "images"
    if suffix in (".npy", ".npz") or is_idx(path):
        return "arrays"
    if suffix == ".pb":
        return "pb"
    return "text" if suffix in TEXTS else "other"


def find_files(source: str | Path, pattern: str | None = None, *, paths: bool = False) -> Found:
    """Return the files behind a path (file or folder, searched in depth) or a pattern with * and ?.

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
    """Return the files that a pattern matches; nothing for a file or a folder, which is not looked into.

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
    """Return what is the same for all names of one folder."""
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
    """Return the files of the one kind of samples among `found`."""
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
