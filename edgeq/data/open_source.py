"""Choose a reader for the user's source of samples, and find the preprocessing that applies.

The files are sorted, and all of them are of the same kind. Files of other kinds are ignored and counted.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, Literal, NoReturn

from edgeq.data.array_files import (
    ArrayFiles,
    find_cases,
    find_image_arrays,
    holds_key,
    open_array_files,
    open_cases,
    open_stacked,
)
from edgeq.data.arrays import is_idx, read_arrays
from edgeq.data.classes import Classes, count_scores, empty_class_note, number_folders, stray_note
from edgeq.data.files import SUFFIXES, ImageFiles
from edgeq.data.input_names import choose_input
from edgeq.data.labels import SUFFIXES as TEXTS
from edgeq.data.labels import Paths, open_text
from edgeq.data.limits import MAX_FILES
from edgeq.data.parts import Role, choose_part
from edgeq.data.preprocess import NoPreprocessingError, Preprocess, choices, load_preprocess
from edgeq.data.python_items import open_python
from edgeq.data.records import FileList, Source
from edgeq.data.source_options import SourceOptions
from edgeq.errors import DataError, UsageError
from edgeq.signature import Signature
from edgeq.util.display import Displayed

Kind = Literal["images", "arrays", "pb", "text", "other"]

READABLE = (
    "images (.jpg, .png, .bmp, .webp, .gif, .tif, .ppm), .npy, .npz, IDX files, test_data_set_N/input_M.pb or one .pb"
)
_ANY_DEPTH = "**"
_SIDECARS = ("preprocess.toml",)
_FOLDER_KINDS: tuple[Kind, ...] = ("images", "arrays", "pb")


@dataclass(frozen=True)
class OpenedSource:
    """Hold a reader together with its preprocessing and notes.

    Attributes:
        name: the name of the source, for people.
        folder: the folder in which label files with relative names are searched.
        sidecar: whether the preprocessing was found next to the data or the model, and not named by the user.
        sorted_classes: number of class folders whose labels come only from their sorted order.
    """

    name: str
    records: Source
    preprocess: Preprocess | None
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    sidecar: bool = False
    sorted_classes: int = 0

    def files(self) -> Sequence[Path]:
        """Return the file of each record, or an empty sequence if the records do not have one file each."""
        if isinstance(self.records, ArrayFiles):
            return [entry.path for entry in self.records.entries for _ in range(entry.plan.count)]
        return self.records.files if isinstance(self.records, FileList) else ()

    def groups(self) -> Sequence[str]:
        """Return each record's class folder, or an empty sequence if there are no class folders."""
        return self.records.groups() if isinstance(self.records, FileList | ArrayFiles) else ()


def open_source(
    source: Any,
    signature: Signature,
    preprocess: Preprocess | str | Path | Mapping[str, Any] | None,
    model: Path | None,
    classes: Classes | None = None,
    role: Role | None = None,
) -> OpenedSource:
    """Open a source and find its preprocessing. See `edgeq.data.samples.open_samples` for the arguments."""
    try:
        return _open(source, signature, preprocess, model, classes, role)
    except OSError as error:
        place = error.filename or source
        raise DataError(f"{place} cannot be read: {error.strerror or error}", "Check it and its permissions") from error


def _open(
    source: Any,
    signature: Signature,
    preprocess: Preprocess | str | Path | Mapping[str, Any] | None,
    model: Path | None,
    classes: Classes | None,
    role: Role | None,
) -> OpenedSource:
    named = load_preprocess(preprocess) if preprocess is not None else None
    if not isinstance(source, str | Path):
        input_name = named.source.input if named is not None else None
        prepared = named is None or _has_only_stack(named)
        # Steps do not accept text, so a text can only be the path of an image.
        files = named is not None and not prepared and (named.spec is not None or named.reads == "path")
        items = open_python(source, signature, prepared=prepared, input_name=input_name, files=files)
        return OpenedSource(f"Python {type(source).__name__}", items, named, items.notes)
    if not str(source):
        raise DataError("the path of the data is empty", "Give a file, a folder or a pattern")
    if Path(source).is_dir():
        os.scandir(source).close()  # raises an error for an unreadable folder, which would otherwise look empty
    notes: list[str] = []
    sidecar = named is None
    if named is None:
        named = _find_with_data(Path(source), notes)
    pattern = named.source.pattern if named is not None else None
    file_set = _find_cases(source, named) or find_files(
        source, pattern, paths=named is not None and named.reads == "path"
    )
    if file_set.kind in ("images", "arrays", "other") and Path(source).is_dir():
        root, part_files, parted = choose_part(file_set.root, file_set.files, role)
        file_set = replace(file_set, root=root, files=part_files)
        notes.extend([parted] if parted else [])
    if named is None:
        named = _find_with_data(file_set.root, notes) or _find_with_model(file_set, model, notes)
    if file_set.ignored:
        notes.append(f"{source}: {file_set.ignored} files of other kinds{' or names' if pattern else ''} ignored")
    model_folders = [model.absolute().parent] if model is not None else []
    sample_files = file_set.files if file_set.kind in ("images", "arrays", "other") else ()
    folders = number_folders(
        file_set.root, sample_files, classes=classes, scores=count_scores(signature), model_folders=model_folders
    )
    records = _choose_reader(source, file_set, signature, named, folders.numbers)
    if named is not None and not records.prepared:
        notes.insert(0, f"preprocessing: {named.name}")
    elif not isinstance(records, ImageFiles):
        notes.insert(0, "preprocessing: none named; the arrays are taken as model inputs")
    unsure = len(folders.numbers) if folders.sorted_names else 0
    return OpenedSource(
        str(source), records, named, (*notes, *folders.notes, *records.notes), file_set.root, sidecar, unsure
    )


def _find_cases(source: str | Path, named: Preprocess | None) -> FileSet | None:
    """Return the test_data_set_N folders in a folder, or the folder itself if it contains input_0.pb. Return None for
    other sources.
    """
    path = Path(source)
    if not path.is_dir() or (named is not None and named.reads != "array"):
        return None

    folders = find_cases(path)
    return FileSet(path, folders, "pb", 0) if folders else None


def _find_with_data(folder: Path, notes: list[str]) -> Preprocess | None:
    sidecar = find_sidecar([folder])
    if sidecar is None:
        return None
    notes.append(f"preprocessing: {sidecar} (found with the data)")
    return load_preprocess(sidecar)


def _find_with_model(file_set: FileSet, model: Path | None, notes: list[str]) -> Preprocess | None:
    sidecar = find_sidecar([model.absolute().parent]) if model is not None else None
    if sidecar is None:
        return None
    loaded = load_preprocess(sidecar)
    # Arrays may already be prepared. So a preprocessing file next to the model applies to them only if it names the
    # array that they contain.
    applies = file_set.kind in ("images", "text") or (
        file_set.kind == "arrays" and any(holds_key(path, loaded.source) for path in file_set.files[:1])
    )
    if not applies:
        return None
    notes.append(f"preprocessing: {sidecar} (found next to the model)")
    return loaded


def _has_only_stack(named: Preprocess) -> bool:
    """Return whether a preprocessing only sets how prepared arrays are stacked and labelled. If so, its spec has no
    steps and names no array of items.
    """
    options = named.source
    unnamed = options.key is None and options.encoded is None and options.layout is None
    return named.spec is not None and not named.spec.steps and unnamed


def _choose_reader(
    source: str | Path, file_set: FileSet, signature: Signature, named: Preprocess | None, classes: Mapping[str, int]
) -> Source:
    options = named.source if named is not None else SourceOptions()
    prepared = named is None or _has_only_stack(named)
    target = choose_input(signature, options.input)
    notes = (*empty_class_note(file_set.root, file_set.files, classes), *stray_note(file_set.root, file_set.files))
    if named is not None and named.reads == "path":
        return Paths(file_set.root, file_set.files, target, classes, notes)
    if file_set.kind == "images":
        if named is None:
            raise NoPreprocessingError(
                f"{source} holds images, no preprocessing is named and there is no preprocess.toml", choices()
            )
        return ImageFiles(file_set.root, file_set.files, target, classes, notes)
    if file_set.kind == "arrays":
        if named is None and target and signature.inputs[0].dtype.kind == "f" and _holds_images(file_set.files[0]):
            raise NoPreprocessingError(f"{source} holds arrays of images, and no preprocessing is named", choices())
        return open_array_files(
            file_set.root, file_set.files, signature, options, prepared=prepared, classes=classes, notes=notes
        )
    if file_set.kind == "pb":
        if file_set.files[0].is_dir():
            return open_cases(file_set.root, file_set.files, signature, prepared=prepared)
        if len(file_set.files) > 1:
            raise DataError(
                f"{source} holds {len(file_set.files)} .pb files but neither input_0.pb nor test_data_set_0",
                "Name one file, or arrange them as test_data_set_N/input_M.pb",
            )
        return open_stacked(file_set.files[0], signature, options.layout, options.stack, prepared=prepared)
    if file_set.kind == "text":
        if named is None or named.reads != "text":
            raise DataError(
                f"{source} is text, which needs a preprocessing function", "Pass ⟨preprocess⟩ file.py:function"
            )
        return open_text(file_set.files[0], target, options.label)
    raise DataError(f"{source} is of no known kind", f"Give {READABLE}")


def _holds_images(path: Path) -> bool:
    """Return whether a file of arrays contains images as bytes."""
    return find_image_arrays(read_arrays(path)) is not None


@dataclass(frozen=True)
class Data(Displayed):
    """Describe samples in the terms of the user; see `edgeq.data.samples.open_samples`.

    Attributes:
        source: path or iterable.
        preprocess: name, specification or file of the preprocessing, or None to look for a file next to the data.
        labels: source of the labels, for data whose reader finds no labels; see `edgeq.data.labels`.
        count: largest number of samples to use, or None to use all.
        role: purpose of the samples, for a folder that has parts for calibration and validation (calib/ and val/), or
            None to use all parts.
    """

    source: Any
    preprocess: Any = None
    labels: Any = None
    count: int | None = None
    role: Role | None = None

    def over(self, preprocess: Any, labels: Any, count: int | None) -> tuple[Any, Any, Any, int | None]:
        """Return source, preprocess, labels and count. If a field is None, the argument of that name replaces it."""
        return (
            self.source,
            self.preprocess if self.preprocess is not None else preprocess,
            self.labels if self.labels is not None else labels,
            self.count if self.count is not None else count,
        )


def as_data(source: Any) -> Data | None:
    """Return `source` as Data, or None if it is None. `source` may also be plain data, such as a path, a list or a
    CalibrationDataReader.
    """
    return source if source is None or isinstance(source, Data) else Data(source)


def check_selection(start: int, stride: int, count: int | None) -> None:
    """Check that `start`, `stride` and `count` are valid.

    Raises:
        UsageError: a count, start or stride is not a whole number, or is too small.
    """
    for name, number in (("start", start), ("stride", stride), ("count", count)):
        try:
            index(number if number is not None else 0)  # numpy's integers also have this method
        except TypeError as error:
            raise UsageError(f"{name} is {number!r}", f"Give {name} as a whole number: {name}=8") from error
    if start < 0 or stride < 1 or (count is not None and count < 1):
        raise UsageError(
            f"start {start}, stride {stride}, count {count}", "Give start 0 or more, stride and count 1 or more"
        )


def sample_paths(samples: Sequence[Data | None]) -> Iterator[Path]:
    """Yield the files and folders that `samples` name. Text that is not a path (a pattern, a preprocessing) is left
    out.
    """
    for data in samples:
        for value in (data.source, data.preprocess, data.labels) if data is not None else ():
            if isinstance(value, (str, Path)) and _exists(Path(value)):
                yield Path(value)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the folder cannot be entered, or the text is too long to be a name
        return False


def find_sidecar(folders: Sequence[Path]) -> Path | None:
    """Return the first `preprocess.toml` in `folders`."""
    return next((f / "preprocess.toml" for f in folders if (f / "preprocess.toml").is_file()), None)


def find_matching_files(pattern: str) -> list[Path]:
    """Return the files that `pattern` matches by the rules of Python's `glob`, sorted. If `**` reaches a file by
    several paths, the file appears only once, if possible under a path without links.

    Raises:
        DataError: the search enters more folders than a data set can have.
    """
    parts = Path(pattern).parts
    if _ANY_DEPTH not in parts:
        return sorted(path for path in map(Path, glob.glob(pattern)) if path.is_file())  # noqa: PTH207  # absolute too
    fixed = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    root, below = Path(*parts[:fixed]), parts[fixed:]
    hidden = any(part.startswith(".") for part in below)
    paths = [
        path for path in _FileSearch(pattern, hidden).files(root, ()) if _matches(path.relative_to(root).parts, below)
    ]
    place = {parent: os.path.realpath(parent) for parent in {path.parent for path in paths}}
    paths.sort(key=lambda path: (place[path.parent] != os.path.abspath(path.parent), path))  # noqa: PTH100  # links stay
    once: dict[tuple[str, str], Path] = {}
    for path in paths:
        once.setdefault((place[path.parent], path.name), path)
    return sorted(once.values())


class _FileSearch:
    """Find every file below a folder. Links are followed, except links to a folder that is already part of the path.

    Args:
        pattern: the pattern, for messages.
        hidden: whether to include names that begin with a dot.
    """

    def __init__(self, pattern: str, hidden: bool) -> None:
        self._pattern, self._hidden = pattern, hidden
        self._entered = 0

    def files(self, folder: Path, above: tuple[str, ...]) -> Iterator[Path]:
        """Yield the files below `folder`. `above` contains the real paths of the folders through which it was
        reached.
        """
        real = os.path.realpath(folder)
        # A link to a folder above would be entered again and again.
        if real in above:
            return
        self._entered += 1
        if self._entered > MAX_FILES:
            raise DataError(f"{self._pattern} searches more than {MAX_FILES} folders", "Give a smaller folder")
        try:
            with os.scandir(folder) as entries:
                within = sorted(entries, key=lambda entry: entry.name)
        except OSError:  # as in glob, an unreadable folder matches nothing
            return
        for entry in within:
            if entry.name.startswith(".") and not self._hidden:
                continue
            path = folder / entry.name
            probe = path if entry.is_symlink() else entry  # checking a directory entry does not access the disk again
            if probe.is_dir():
                yield from self.files(path, (*above, real))
            elif probe.is_file():
                yield path


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    # Keep the numbers of names that the parts so far can match. A recursion would try each division of the names, and
    # their number grows exponentially with the number of `**`.
    matched = {0}
    for part in pattern:
        if part == _ANY_DEPTH:
            for count in range(min(matched), len(names)):
                if count in matched and not names[count].startswith("."):
                    matched.add(count + 1)
        else:
            matched = {
                count + 1
                for count in matched
                if count < len(names)
                and (part.startswith(".") or not names[count].startswith("."))
                and fnmatch.fnmatch(names[count], part)
            }
        if not matched:
            return False
    return len(names) in matched


@dataclass(frozen=True)
class FileSet:
    """Hold the files that contain the samples.

    Attributes:
        root: the folder to which the names of samples are relative.
        files: the files, sorted by their path below `root`.
        kind: the kind of the files.
        ignored: number of other files, which are ignored.
    """

    root: Path
    files: tuple[Path, ...]
    kind: Kind
    ignored: int


def kind_of(path: Path) -> Kind:
    """Return the kind of a file, by its name."""
    suffix = path.suffix.lower()
    if suffix in SUFFIXES:
        return "images"
    if suffix in (".npy", ".npz") or is_idx(path):
        return "arrays"
    if suffix == ".pb":
        return "pb"
    return "text" if suffix in TEXTS else "other"


def find_files(source: str | Path, pattern: str | None = None, *, paths: bool = False) -> FileSet:
    """Return the files that a path or a pattern with * and ? names. A path is a file, or a folder whose sub-folders are
    also searched.

    Args:
        pattern: pattern of the file names to keep, such as "*.wav".
        paths: whether to accept files of any kind, for a preprocessing that reads paths.

    Raises:
        DataError: there are no such files, or the files are of several kinds.
    """
    path = Path(source)
    candidates = check_source(source)
    if candidates:
        root = Path(os.path.commonpath([p.parent for p in candidates]))
    else:
        candidates, root = (_walk(path), path) if path.is_dir() else ([path], path.parent)
    candidates = [p for p in candidates if p.name not in _SIDECARS]
    fitting = tuple(p for p in candidates if pattern is None or p.match(pattern))
    if not fitting and pattern is not None:
        raise DataError(f"{source} holds no file that matches {pattern!r}", "Correct source.pattern")
    if paths and not fitting:
        raise DataError(f"{source} holds no files", "Check the path")
    if paths:
        return FileSet(root, fitting, "other", len(candidates) - len(fitting))
    sample_files, kind = _choose_kind(source, root, fitting)
    return FileSet(root, sample_files, kind, len(candidates) - len(sample_files))


def check_source(source: str | Path) -> list[Path]:
    """Check that a source exists. If it is a pattern, return the files that the pattern matches. If it is a file or a
    folder, return nothing, without reading the content.

    Raises:
        DataError: the source does not exist.
    """
    path = Path(source)
    if not path.exists() and glob.has_magic(str(source)):
        matches = find_matching_files(str(source))
        if not matches:
            raise DataError(f"{source} matches no file", "Correct the pattern")
        return matches
    if not path.exists():
        raise DataError(f"{path} does not exist", "Check the path of the data")
    if not path.is_file() and not path.is_dir():
        raise DataError(f"{path} is neither a file nor a folder", f"Give {READABLE}")
    return []


def _walk(folder: Path) -> list[Path]:
    files: list[Path] = []
    # Links are followed after the real folders next to them. So a folder that is reached twice is listed under its own
    # name.
    starts = [folder]
    entered: set[tuple[int, int]] = set()
    for start in starts:
        for parent, folders, names in os.walk(start, onerror=_refuse):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            identity = _identify(parent)
            if identity in entered:
                folders.clear()
                continue
            entered.add(identity)
            starts.extend(path for name in folders if (path := Path(parent, name)).is_symlink())
            files.extend(Path(parent, name) for name in names if not name.startswith("."))
            if len(files) > MAX_FILES:
                raise DataError(f"{folder} contains more than {MAX_FILES} files", "Give a smaller folder")
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _identify(folder: str) -> tuple[int, int]:
    """Return the device and inode of a folder, which are the same whichever path leads to it."""
    try:
        status = os.stat(folder)  # noqa: PTH116  # os.walk gives text
    except OSError as error:
        _refuse(error)
    return status.st_dev, status.st_ino


def _refuse(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename} cannot be read: {error.strerror}", "Check the folder and its permissions"
    ) from error


def _choose_kind(source: str | Path, root: Path, files: tuple[Path, ...]) -> tuple[tuple[Path, ...], Kind]:
    """Return the files among `files` that contain samples. All of them must be of one kind."""
    if len(files) == 1 and Path(source).is_file():
        return files, kind_of(files[0])
    counts = Counter(kind_of(path) for path in files)
    kinds = [kind for kind in _FOLDER_KINDS if counts[kind]]
    if not kinds:
        note = f" ({len(files)} other files)" if files else ""
        raise DataError(f"{source} holds no samples{note}", f"Put samples there: {READABLE}")
    if len(kinds) > 1:
        contents = ", ".join(f"{counts[kind]} {kind}" for kind in kinds)
        first_path = next(path for path in files if kind_of(path) == kinds[0])
        # IDX files may have no suffix, and the suffix pattern "*" would match files of all kinds.
        nested = "**" if len(first_path.relative_to(root).parts) > 1 else ""
        one_kind = Path(glob.escape(str(root)), nested, f"*{first_path.suffix or glob.escape(first_path.name)}")
        raise DataError(f"{source} holds several kinds of data ({contents})", f"Name one kind, as '{one_kind}'")
    return tuple(path for path in files if kind_of(path) == kinds[0]), kinds[0]


def in_role(data: Data, role: Role) -> Data:
    """Return `data` with `role` as its purpose, unless it already has a purpose."""
    return data if data.role is not None else replace(data, role=role)


def has_parts(data: Data) -> bool:
    """Return whether `data` is a folder that has one part for calibration and one for validation."""
    if not isinstance(data.source, str | Path) or not Path(data.source).is_dir() or data.role is not None:
        return False
    try:
        file_set = find_files(data.source)
    except DataError:  # the error is reported when the samples are opened
        return False
    return file_set.kind in ("images", "arrays") and bool(choose_part(file_set.root, file_set.files, "validation")[2])
