"""Progress of long work. Library code takes a `Progress`; the command line draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
