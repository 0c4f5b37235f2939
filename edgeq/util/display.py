"""Show results as one line or as tables, and show progress on stderr."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from pathlib import PurePath
from time import perf_counter
from typing import Any, Protocol

from edgeq.arguments import as_arguments, as_options
from edgeq.util.registry import RENDERERS, Registry

# The longest line, the longest text and sentence in it, and the largest collection that is shown with its items. A line
# ends below 400 characters, so that a traceback or a log shows it whole.
_LINE, _TEXT, _SENTENCE, _FEW = 390, 40, 160, 3

REGISTRY: Registry[Callable[[Mapping[str, Any]], str]] = Registry(RENDERERS, callable, "function")
"""Functions that draw a result in notebooks. `edgeq.report` registers them, because it is in a higher layer than the
results.
"""


class Displayed:
    """Give a dataclass a one-line `repr` of at most 390 characters, whatever it contains."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Displayed.__repr__  # type: ignore[method-assign]  # @dataclass keeps what is there

    def __brief__(self) -> Mapping[str, Any]:
        """Return the values that the line shows. By default these are all fields. Empty values are omitted."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __repr__(self) -> str:
        parts = [
            f"{_cut(repr(name)[1:-1])}={_brief(value)}" for name, value in self.__brief__().items() if not _empty(value)
        ]
        line = f"{type(self).__name__}({', '.join(parts)})"
        return line if len(line) <= _LINE else f"{line[: _LINE - 3]}, …)"


class Page(Displayed):
    """Draw a result in notebooks the way the report draws it."""

    def __page__(self) -> Mapping[str, Any]:
        """Return the record that docs/report.md describes, plus "tables": for each table, a caption, column heads and
        rows of text.
        """
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return REGISTRY.load("html")(_in_python_words(self.__page__()))


_SENTENCES = frozenset({"notes", "warnings", "verdict", "needed", "doubts"})


def _in_python_words(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a page's record with Python's arguments in its sentences. Its commands and names stay those of a shell."""
    page: dict[str, Any] = {}
    for key, value in record.items():
        words = as_arguments if key in _SENTENCES else as_options
        if isinstance(value, Mapping):
            page[key] = _in_python_words(value)
        elif isinstance(value, list | tuple):
            page[key] = [
                _in_python_words(item) if isinstance(item, Mapping) else words(item) if isinstance(item, str) else item
                for item in value
            ]
        else:
            page[key] = words(value) if isinstance(value, str) else value
    return page


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | Mapping | tuple | list | frozenset) and not value)


def _brief(value: Any) -> str:
    if isinstance(value, bool | int):
        return _cut(repr(value))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str | PurePath):
        # Numbers and their units have a narrow space between them. repr would show the escape code of that space.
        text = str(value).replace("\u202f", " ")
        return repr(_cut(as_arguments(text), _SENTENCE if ". " in text or text.endswith(".") else _TEXT))
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    if dataclasses.is_dataclass(value):
        name = getattr(value, "title", None) or getattr(value, "name", None)
        return repr(_cut(name)) if isinstance(name, str) else f"{type(value).__name__}(…)"
    if isinstance(value, Sized) and not isinstance(value, range):
        if isinstance(value, Mapping | tuple | list) and len(value) <= _FEW and all(map(_is_short, value)):
            if not isinstance(value, Mapping):
                return ", ".join(_brief(item) for item in value).join("[]")
            if all(map(_is_short, value.values())):
                items = (f"{_cut(repr(str(name))[1:-1])}: {_brief(item)}" for name, item in value.items())
                return ", ".join(items).join("{}")
        return f"<{len(value)} {'item' if len(value) == 1 else 'items'}>"
    return _cut(repr(value)) if isinstance(value, range) else f"<{type(value).__name__}>"


def _is_short(value: Any) -> bool:
    return isinstance(value, str | PurePath | int | float)


def _cut(text: str, limit: int = _TEXT) -> str:
    """Shorten a long text by leaving out its middle, because names and paths usually differ at their ends."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"


Advance = Callable[[int], None]


class Progress(Protocol):
    """Receive a job's progress as stages and notes."""

    def stage(self, title: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Open a stage of `total` steps, or of an unknown number if `total` is None. After each advance, call the
        yielded function with the number of steps just completed.
        """

    def note(self, text: str) -> None:
        """Show one line that the user should see now: a decision, a fallback or a warning."""


class Silent:
    """Ignore progress, for callers that do not want to show any."""

    def __repr__(self) -> str:
        # `help` shows this as the default of `progress`.
        return "edgeq.SILENT"

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Open a stage that shows nothing; see `Progress.stage`."""
        yield lambda steps: None

    def note(self, text: str) -> None:
        """Drop `text`."""
        del text


SILENT = Silent()
OTHER = "everything else"


class Stopwatch:
    """Pass progress on to another display, and measure the time of each stage."""

    def __init__(self, display: Progress) -> None:
        self._shown, self._start = display, perf_counter()
        self._stages: dict[str, float] = {}

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Open a stage; see `Progress.stage`. If several stages have the same title, their times are added."""
        start = perf_counter()
        try:
            with self._shown.stage(title, total) as advance:
                yield advance
        finally:
            self._stages[title] = self._stages.get(title, 0.0) + perf_counter() - start

    def note(self, text: str) -> None:
        """Pass on `text`; see `Progress.note`."""
        self._shown.note(text)

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent so far in each stage, in order, and outside all stages."""
        remainder = perf_counter() - self._start - sum(self._stages.values())
        return {title: round(seconds, 3) for title, seconds in (*self._stages.items(), (OTHER, max(0.0, remainder)))}
