"""Progress of long work. Library code takes a `Progress`; the command line draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    def stage(self, title: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Open a stage of `total` steps (None: unknown); the value it gives is called with the steps just done."""

    def note(self, text: str) -> None:
        """Say one line that matters now: a decision, a fallback, a warning."""


class Silent:
    """Progress for callers that do not want any."""

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
    """Progress that is shown by another one, and remembers what each stage took."""

    def __init__(self, shown: Progress) -> None:
        self._shown, self._start = shown, perf_counter()
        self._stages: dict[str, float] = {}

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """See `Progress.stage`; stages of one title add up."""
        start = perf_counter()
        try:
            with self._shown.stage(title, total) as advance:
                yield advance
        finally:
            self._stages[title] = self._stages.get(title, 0.0) + perf_counter() - start

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self._shown.note(text)

    def seconds(self) -> dict[str, float]:
        """Of each stage so far, in their order, and of all that was in none."""
        rest = perf_counter() - self._start - sum(self._stages.values())
        return {title: round(taken, 3) for title, taken in (*self._stages.items(), (OTHER, max(0.0, rest)))}
