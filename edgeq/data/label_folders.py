"""Take labels from a folder with one file for each sample: masks, target images or texts beside the images.

The label is the file's path. It has the path of the sample below the data folder, or the sample's file name, apart from
the suffix.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from edgeq.data.limits import MAX_FILES
from edgeq.data.records import Record
from edgeq.errors import DataError


def label_by_files(folder: Path) -> Callable[[int, Record], Any]:
    """Return a function that returns the path of a record's label file in `folder`.

    Raises:
        DataError: the folder cannot be read, or has too many files. The function raises it if no file, or more than
            one, belongs to the record.
    """
    files: dict[str, list[Path]] = {}
    try:
        for number, path in enumerate(sorted(folder.rglob("*"))):
            if number >= MAX_FILES:
                raise DataError(f"{folder} has more than {MAX_FILES} files", "Give a folder of label files only")
            if path.is_file() and not path.name.startswith("."):
                below = path.relative_to(folder).with_suffix("").as_posix()
                for key in {below, path.stem}:
                    files.setdefault(key, []).append(path)
    except OSError as error:
        raise DataError(f"labels: {folder} cannot be read: {error.strerror}", "Check its permissions") from error

    def label_of(index: int, record: Record) -> Any:
        """Return the path of the record's label file."""
        del index
        file = str(record.context.get("path", record.context.get("file", record.name)))
        stem = PurePosixPath(file).with_suffix("").as_posix()
        matching = files.get(stem) or files.get(PurePosixPath(stem).name, [])
        if len(matching) != 1:
            several = f"{len(matching)} files" if matching else "no file"
            raise DataError(f"labels: {folder} has {several} for {file}", "Give each sample one file of its name")
        return matching[0]

    return label_of
