"""From what the user named to a reader: which preprocessing applies, and which reader reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from edgeq.data.array_files import find_cases, holds_key, open_array_files, open_cases, open_stacked
from edgeq.data.files import READABLE, Found, ImageFiles, find_files
from edgeq.data.fit import first_input
from edgeq.data.labels import Paths, open_text
from edgeq.data.preprocess import (
    NoPreprocessingError,
    Preprocess,
    SourceOptions,
    choices,
    find_sidecar,
    load_preprocess,
)
from edgeq.data.python_items import open_python
from edgeq.data.records import Source, class_folders, empty_classes, strays
from edgeq.errors import DataError, UsageError
from edgeq.signature import Signature
from edgeq.util.display import Displayed


@dataclass(frozen=True)
class Opened:
    """A reader and what goes with it.

    Attributes:
        name: the source, for people.
        folder: where relative names of label files are looked for.
        sidecar: whether the preprocessing was found beside the data or the model rather than named.
    """

    name: str
    records: Source
    preprocess: Preprocess | None
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    sidecar: bool = False


def open_source(
    source: Any,
    signature: Signature,
    preprocess: Preprocess | str | Path | Mapping[str, Any] | None,
    model: Path | None,
) -> Opened:
    """See `edgeq.data.samples.open_samples`."""
    try:
        return _open(source, signature, preprocess, model)
    except OSError as error:
        place = error.filename or source
        raise DataError(f"{place} cannot be read: {error.strerror or error}", "Check it and its permissions") from error


def _open(
    source: Any,
    signature: Signature,
    preprocess: Preprocess | str | Path | Mapping[str, Any] | None,
    model: Path | None,
) -> Opened:
    named = load_preprocess(preprocess) if preprocess is not None else None
    if not isinstance(source, str | Path):
        wanted = named.source.input if named is not None else None
        prepared = named is None or _only_stack(named)
        # Steps take no text, so that text can only be the path of an image.
        files = named is not None and not prepared and (named.spec is not None or named.reads == "path")
        items = open_python(source, signature, prepared=prepared, wanted=wanted, files=files)
        return Opened(f"Python {type(source).__name__}", items, named, items.notes)
    if not str(source):
        raise DataError("the path of the data is empty", "Give a file, a folder or a pattern")
    if Path(source).is_dir():
        os.scandir(source).close()  # distinguishes a folder that may not be listed from an empty one
    notes: list[str] = []
    sidecar = named is None
    if named is None:
        named = _with_the_data(Path(source), notes)
    pattern = named.source.pattern if named is not None else None
    found = _cases(source, named) or find_files(source, pattern, paths=named is not None and named.reads == "path")
    if named is None:
        named = _with_the_data(found.root, notes) or _with_the_model(found, model, notes)
    if found.ignored:
        notes.append(f"{source}: {found.ignored} files of other kinds{' or names' if pattern else ''} ignored")
    records = _reader(source, found, signature, named)
    if named is not None and not records.prepared:
        notes.insert(0, f"preprocessing: {named.name}")
    elif not isinstance(records, ImageFiles):
        notes.insert(0, "preprocessing: none named; the arrays are taken as model inputs")
    return Opened(str(source), records, named, (*notes, *records.notes), found.root, sidecar)


def _cases(source: str | Path, named: Preprocess | None) -> Found | None:
    """Return a folder of test_data_set_N, or one that holds input_0.pb itself."""
    path = Path(source)
    if not path.is_dir() or (named is not None and named.reads != "array"):
        return None

    folders = find_cases(path)
    return Found(path, folders, "pb", 0) if folders else None


def _with_the_data(folder: Path, notes: list[str]) -> Preprocess | None:
    near = find_sidecar([folder])
    if near is None:
        return None
    notes.append(f"preprocessing: {near} (found with the data)")
    return load_preprocess(near)


def _with_the_model(found: Found, model: Path | None, notes: list[str]) -> Preprocess | None:
    beside = find_sidecar([model.absolute().parent]) if model is not None else None
    if beside is None:
        return None
    loaded = load_preprocess(beside)
    # Arrays may be prepared already; a file beside the model speaks of them only if it names the array that they hold.
    applies = found.kind in ("images", "text") or (
        found.kind == "arrays" and any(holds_key(path, loaded.source) for path in found.files[:1])
    )
    if not applies:
        return None
    notes.append(f"preprocessing: {beside} (found beside the model)")
    return loaded


def _only_stack(named: Preprocess) -> bool:
    """Return whether a preprocessing says only how prepared arrays are stacked and labelled: its spec has no steps and
    names no array of items."""
    options = named.source
    unnamed = options.key is None and options.encoded is None and options.layout is None
    return named.spec is not None and not named.spec.steps and unnamed


def _reader(source: str | Path, found: Found, signature: Signature, named: Preprocess | None) -> Source:
    options = named.source if named is not None else SourceOptions()
    prepared = named is None or _only_stack(named)
    target = first_input(signature, options.input)
    classes = class_folders(found.root, found.files)
    notes = (*empty_classes(found.root, found.files, classes), *strays(found.root, found.files))
    if named is not None and named.reads == "path":
        return Paths(found.root, found.files, target, classes, notes)
    if found.kind == "images":
        if named is None:
            raise NoPreprocessingError(
                f"{source} holds images, no preprocessing is named and there is no preprocess.toml", choices()
            )
        return ImageFiles(found.root, found.files, target, classes, notes)
    if found.kind == "arrays":
        return open_array_files(
            found.root, found.files, signature, options, prepared=prepared, classes=classes, notes=notes
        )
    if found.kind == "pb":
        if found.files[0].is_dir():
            return open_cases(found.root, found.files, signature, prepared=prepared)
        if len(found.files) > 1:
            raise DataError(
                f"{source} holds {len(found.files)} .pb files but neither input_0.pb nor test_data_set_0",
                "Name one file, or arrange them as test_data_set_N/input_M.pb",
            )
        return open_stacked(found.files[0], signature, options.layout, options.stack, prepared=prepared)
    if found.kind == "text":
        if named is None or named.reads != "text":
            raise DataError(
                f"{source} is text, which needs a preprocessing function", "Pass --preprocess file.py:function"
            )
        return open_text(found.files[0], target, options.label)
    raise DataError(f"{source} is of no known kind", f"Give {READABLE}")


@dataclass(frozen=True)
class Data(Displayed):
    """Samples as a user names them; see `edgeq.data.samples.open_samples`.

    Attributes:
        source: path or iterable.
        preprocess: name, specification or file; None looks for one beside the data.
        labels: where labels are, for readers that need telling.
        count: take at most so many; None takes all.
    """

    source: Any
    preprocess: Any = None
    labels: Any = None
    count: int | None = None

    def over(self, preprocess: Any, labels: Any, count: int | None) -> tuple[Any, Any, Any, int | None]:
        """Return the four fields, with the arguments in place of those that are None."""
        return (
            self.source,
            self.preprocess if self.preprocess is not None else preprocess,
            self.labels if self.labels is not None else labels,
            self.count if self.count is not None else count,
        )


def as_data(given: Any) -> Data | None:
    """`given` as Data: it may be a bare source too, such as a path, a list or a CalibrationDataReader."""
    return given if given is None or isinstance(given, Data) else Data(given)


def check_selection(start: int, stride: int, count: int | None) -> None:
    """Refuse what cannot choose samples.

    Raises:
        UsageError: a count, start or stride that is no whole number, or makes no sense.
    """
    for name, number in (("start", start), ("stride", stride), ("count", count)):
        try:
            index(number if number is not None else 0)  # numpy's integers have it too
        except TypeError as error:
            raise UsageError(f"{name} is {number!r}", f"Give {name} as a whole number: {name}=8") from error
    if start < 0 or stride < 1 or (count is not None and count < 1):
        raise UsageError(
            f"start {start}, stride {stride}, count {count}", "Give start 0 or more, stride and count 1 or more"
        )


def sample_paths(samples: Sequence[Data | None]) -> Iterator[Path]:
    """Yield the files and folders that samples name. Text that names none (a pattern, a preprocessing) is left out."""
    for data in samples:
        for value in (data.source, data.preprocess, data.labels) if data is not None else ():
            if isinstance(value, (str, Path)) and _exists(Path(value)):
                yield Path(value)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder that cannot be entered, or a text too long to be a name
        return False
