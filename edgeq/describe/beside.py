"""Read the files that exporters write next to a model. They are untrusted: sizes are limited, and nothing is run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from edgeq.errors import DataError

# A dictionary of 20 000 characters in YAML takes about 200 kB, and names of 21 000 classes in JSON about 1 MB.
_LARGEST = 4 << 20
_DEEPEST = 16
_MOST_ITEMS = 1 << 20
_MOST_NAMES = 1 << 17
_LARGEST_NUMBER = 1 << 128
_LONGEST_NAME = 1000


def find_text(path: Path, marks: Sequence[str]) -> str | None:
    """Return the text of a file, or None if it is absent or contains none of the `marks` of its writer.

    Raises:
        DataError: the file has the writer's mark, but is too large or is not UTF-8.
    """
    # A link to a file is followed, because download caches consist of links.
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError:  # The file is not readable, so it states nothing.
        return None
    if marks and not any(mark.encode() in content for mark in marks):
        return None
    if len(content) > _LARGEST:
        raise DataError(f"{path} is larger than {_LARGEST} bytes", "Correct the file, or move it away")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}", "Correct the file, or move it away") from error


def find_json(path: Path, *marks: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if it is absent or contains none of the `marks` of its writer.

    Raises:
        DataError: the file has the writer's mark, but is damaged.
    """
    return _parse(path, marks, json.loads)


def find_yaml(path: Path, *marks: str) -> dict[str, Any] | None:
    """Return the YAML mapping in a file, or None if it is absent or contains none of the `marks` of its writer.

    Raises:
        DataError: the file has the writer's mark, but is damaged.
    """
    return _parse(path, marks, _load_yaml)


# libyaml is a hundred times faster, but not every platform's package has it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _load_yaml(text: str) -> Any:
    """Return plain values. A reference, by which a small text becomes a huge value, and deep nesting are refused
    first, because a loader follows both.
    """
    depth = 0
    for event in yaml.parse(text, _LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
            raise ValueError("it has references, or is nested too deeply")
    return yaml.load(text, _LOADER)


def _parse(path: Path, marks: Sequence[str], parse: Callable[[str], Any]) -> dict[str, Any] | None:
    text = find_text(path, marks)
    if text is None:
        return None
    problem = "is not a table of keys and values, or is nested too deeply"
    try:
        value = parse(text)
        if isinstance(value, dict) and _is_bounded(value):
            return value
    # Parsers report damaged values by several kinds of errors, such as TypeError for a list as a key.
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError, yaml.YAMLError) as error:
        problem = f"cannot be read: {' '.join(str(error).split())[:120] or type(error).__name__}"
    raise DataError(f"{path} {problem}", "Correct the file, or move it away")


def _is_bounded(value: Any) -> bool:
    """Return whether a value has few levels, few items, and no number of more digits than can be shown."""
    level, count = [value], 0
    for _ in range(_DEEPEST):
        tables = [item for item in level if isinstance(item, dict)]
        lists = [item for item in level if isinstance(item, list)]
        level = [item for parent in [*(table.values() for table in tables), *lists] for item in parent]
        count += len(level)
        numbers = (item for group in (level, *tables) for item in group if isinstance(item, int))
        if any(abs(number) > _LARGEST_NUMBER for number in numbers) or count > _MOST_ITEMS:
            return False
        if not level:
            return True
    return False


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 and math.isfinite(value)


def read_numbers(value: Any, subject: str) -> list[float]:
    """Return one to four finite numbers.

    Raises:
        DataError: the value is something else.
    """
    values = value if isinstance(value, list | tuple) else [value]
    if not 1 <= len(values) <= 4 or not all(map(is_number, values)):
        raise DataError(f"{subject} is {str(value)[:60]}, not numbers", "Correct the file, or move it away")
    return [float(item) for item in values]


def read_names(value: Any, subject: str) -> tuple[str, ...]:
    """Return the names of a list, or of a mapping with the keys 0 to n - 1 (numbers, or numbers as text).

    Raises:
        DataError: the value is something else, or has too many or too long names.
    """
    if isinstance(value, dict):
        numbered = {int(key): name for key, name in value.items() if re.fullmatch(r"[0-9]{1,9}", str(key))}
        if len(numbered) != len(value) or sorted(numbered) != list(range(len(value))):
            raise DataError(f"{subject} does not number its names from 0", "Correct it, or give ⟨classes⟩")
        value = [numbered[number] for number in range(len(numbered))]
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"{subject} is neither a list of names nor a table of numbers and names", "Correct it")
    return check_names(value, subject)


def check_names(names: Iterable[Any], subject: str) -> tuple[str, ...]:
    """Return names as text.

    Raises:
        DataError: there are too many names, or one is too long or no text.
    """
    listed = tuple(str(name) if is_number(name) else name for name in names)
    if len(listed) > _MOST_NAMES or not all(isinstance(name, str) and len(name) <= _LONGEST_NAME for name in listed):
        raise DataError(
            f"{subject} has more than {_MOST_NAMES} names, or one that is no text of up to {_LONGEST_NAME} characters",
            "Correct it",
        )
    return listed
