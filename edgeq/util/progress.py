"""Show progress and notes: as bars on a terminal, and as text in a notebook's cell."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click
from edgeq_device.system.relay import bypass_filter, escape, escape_lines

from edgeq.arguments import as_arguments
from edgeq.util.display import SILENT, Advance, Progress

if TYPE_CHECKING:
    from rich.console import Console

_BAR = 24
# Seconds between two drawings, because each sends the whole text to the browser.
_AGAIN_S = 0.2


def default_progress() -> Progress:
    """Return the progress display for a Python session: one for a notebook, one for a terminal, or a silent one."""
    if (display := _notebook()) is not None:
        return NotebookProgress(display)
    return StderrProgress(as_arguments) if sys.stderr is not None and sys.stderr.isatty() else SILENT


def _notebook() -> Any | None:
    """Return IPython's display module if this process runs in a notebook's kernel, or else None."""
    # In a notebook, the kernel has imported IPython already. Importing it elsewhere would take time for nothing.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return sys.modules.get("IPython.display") if hasattr(shell, "kernel") else None


def watched_console() -> Console:
    """Return a rich console on stderr for content that is redrawn. Text printed above this content stays plain."""
    # Only commands with a bar need rich, and the others start faster without it.
    from rich.console import Console
    from rich.text import Text

    class Watched(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            # Text above a bar may contain names from models, whose control characters could move the cursor.
            escaped = (Text(escape_lines(thing.plain)) if isinstance(thing, Text) else thing for thing in objects)
            super().print(*escaped, **options)

    return Watched(file=bypass_filter(sys.stderr))


class StderrProgress:
    """Show bars and notes on stderr.

    Args:
        words: function that names arguments in a note for the reader; see `edgeq.arguments`.
        step: function that is called with each step of progress.
        quiet: whether to show nothing.
    """

    def __init__(
        self, words: Callable[[str], str], step: Callable[[], None] = lambda: None, *, quiet: bool = False
    ) -> None:
        self._words, self._step, self._quiet = words, step, quiet
        self._printed: set[str] = set()

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Open a stage; see `Progress.stage`."""
        with self._bar(title, total) as advance:
            self._step()

            def stepping(steps: int) -> None:
                self._step()
                advance(steps)

            yield stepping
        self._step()

    @contextmanager
    def _bar(self, title: str, total: int | None) -> Iterator[Advance]:
        """Draw a bar with speed and remaining time on a terminal, and nothing elsewhere."""
        if self._quiet or not sys.stderr.isatty():
            yield lambda steps: None
            return
        from rich import progress
        from rich.text import Text

        class Speed(progress.ProgressColumn):
            def render(self, task: progress.Task) -> Text:
                return Text(f"{task.speed:.1f}/s" if task.speed else "")

        columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            Speed(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=watched_console(), transient=True) as bar:
            task = bar.add_task(escape(title), total=total)
            yield lambda steps: bar.advance(task, steps)

    def note(self, text: str) -> None:
        """Print `text` on stderr, but only once, because calibration and validation data often give the same notes."""
        if not self._quiet and text not in self._printed:
            self._printed.add(text)
            click.echo(escape(self._words(text)).replace("\u202f", " "), err=True)


class NotebookProgress:
    """Show notes and, below them, the current stage in a notebook. Each change redraws the cell's output as one text.

    Args:
        display: the module `IPython.display`.
    """

    def __init__(self, display: Any) -> None:
        self._display, self._id, self._shown = display, f"edgeq-{uuid4().hex}", False
        self._stages: list[list[Any]] = []
        self._notes: list[str] = []
        self._next = 0.0

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Open a stage; see `Progress.stage`."""
        state: list[Any] = [escape(title), 0, total]
        self._stages.append(state)
        self._draw()

        def advance(steps: int) -> None:
            state[1] += steps
            if time.monotonic() >= self._next:
                self._draw()

        try:
            yield advance
        finally:
            self._stages.remove(state)
            self._draw()

    def note(self, text: str) -> None:
        """Show `text`, unless it is already shown."""
        line = escape(as_arguments(text))
        if line not in self._notes:
            self._notes.append(line)
            self._draw()

    def _draw(self) -> None:
        self._next = time.monotonic() + _AGAIN_S
        lines = [*self._notes]
        # Outer stages stand still while the innermost one runs.
        for title, count, total in self._stages[-1:]:
            filled = round(_BAR * min(1.0, count / total)) if total else 0
            bar = f" {'█' * filled}{'░' * (_BAR - filled)} {count}/{total}" if total else f" {count}" if count else ""
            lines.append(f"{title}{bar}")
        show = self._display.update_display if self._shown else self._display.display
        self._shown = True
        show({"text/plain": "\n".join(lines)}, raw=True, display_id=self._id)
