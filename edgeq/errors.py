"""Define every exception that edgeq raises on purpose, and the exit code of each.

    EdgeqError                   1
    ├── UsageError               2   an argument or option that makes no sense
    ├── ModelError               3   a file that is not a model, a damaged model, or one that edgeq does not support
    ├── DataError                4   samples: missing, unreadable, wrong name, shape or dtype, NaN
    ├── HardwareError            5   a profile or target that is unknown, malformed or does not fit
    ├── OutputError              6   a path that cannot be written, or that already contains something
    ├── BundleError              7   a bundle that is damaged, tampered with or not for this machine
    ├── RuntimeUnavailableError  8   onnxruntime (or an extra) is missing, or refuses the artifact
    │   ├── EngineError         8   an engine's process ended, does not answer, or refuses the model
    │   └── BoardError          8   a board over SSH: unreachable, in use, disconnected, full, or missing a requirement
    ├── CalibrationError         9   statistics or a table: incomplete, non-finite, of another model
    ├── CheckFailedError        10   a failed check: self-test, accuracy, coverage, speed, another input size
    ├── GoalNotMetError         11   tuning ended and no candidate meets the goal
    ├── BudgetError             12   the work needs more memory or processor time than the budget allows
    ├── WorseError              13   a gate: worse than the baseline by more than the limits allow
    └── InconclusiveError       14   a gate: the machine was too busy to decide

The exit code after Ctrl-C is 130, as in shells.

A message is one line: what is wrong, where (file, node, field), and what to do about it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from edgeq.arguments import as_arguments


def one_line(text: object, *, most: int | None = None) -> str:
    """Return the text of another program or library, such as an exception, as one line for a message. An error
    of edgeq keeps its marks.

    Text longer than `most` characters ends at the end of a word, with "…". A long word is cut only if less than half of
    the text were left without it.
    """
    line = " ".join((text.text if isinstance(text, EdgeqError) else str(text)).split())
    if most is None or len(line) <= most:
        return line
    words = line[:most].rpartition(" ")[0]  # leaves room for "…"
    cut = words if len(words) >= most // 2 else line[: most - 1]
    return f"{cut.rstrip(' ,;:(')}…"


class EdgeqError(Exception):
    """Serve as the base class of all exceptions that edgeq raises on purpose. `str(error)` names arguments as Python
    does.

    Args:
        problem: what is wrong and where, in one sentence. A full stop at the end is dropped.
        fix: what the reader can do about it, in the imperative.
    """

    exit_code = 1

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem = problem.rstrip(".")
        self.fix = fix
        super().__init__(f"{self.problem}. {fix}" if fix else self.problem)

    @property
    def text(self) -> str:
        """Return the message with the marks of `edgeq.arguments`, to show it as options or to put it into a text."""
        return f"{self.problem}. {self.fix}" if self.fix else self.problem

    def __str__(self) -> str:
        return as_arguments(self.text)

    def _render_traceback_(self) -> list[str]:
        """Return only the message, which IPython and notebooks show instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]

    def __reduce__(self) -> tuple[Any, ...]:
        # The inherited `__reduce__` would pass the joined text as the only argument.
        return type(self), (self.problem, self.fix)


class UsageError(EdgeqError):
    """Report an argument or option that makes no sense."""

    exit_code = 2


class ModelError(EdgeqError):
    """Report a file that is not a model, a damaged model, or a model that edgeq does not support."""

    exit_code = 3


class DataError(EdgeqError):
    """Report missing, unreadable or unsuitable samples."""

    exit_code = 4


class HardwareError(EdgeqError):
    """Report a profile or target that is unknown or malformed, or that does not fit the request."""

    exit_code = 5


class OutputError(EdgeqError):
    """Report an output path that cannot be written or already contains something."""

    exit_code = 6


class BundleError(EdgeqError):
    """Report a bundle that is damaged, tampered with or not for this machine."""

    exit_code = 7


class RuntimeUnavailableError(EdgeqError):
    """Report that onnxruntime or an extra is missing, or that onnxruntime refuses the artifact."""

    exit_code = 8


class EngineError(RuntimeUnavailableError):
    """Report that an engine failed in its own process. edgeq continues without the engine if other kernels can run the
    model.
    """


class BoardError(RuntimeUnavailableError):
    """Report that a board cannot be used over SSH, or has stopped responding. Work that can be resumed keeps its
    measurements.
    """


class CalibrationError(EdgeqError):
    """Report statistics or a calibration table that are incomplete, not finite or from another model."""

    exit_code = 9


class CheckFailedError(EdgeqError):
    """Report a failed check of the self-test, accuracy, coverage or speed, or a wrong result at another input size."""

    exit_code = 10


def unwritten(error: CheckFailedError, output: str) -> CheckFailedError:
    """Return the error with the output that was not written because of it."""
    return type(error)(f"{error.problem}; {output} is not written", error.fix)


class GoalNotMetError(EdgeqError):
    """Report a missed goal. `record` is the tuning record of the candidates that edgeq found, as plain values."""

    exit_code = 11

    def __init__(self, problem: str, fix: str = "", record: Mapping[str, Any] | None = None) -> None:
        super().__init__(problem, fix)
        self.record = record or {}


class BudgetError(EdgeqError):
    """Report that the work would take more memory or processor time than `EDGEQ_BUDGET` allows."""

    exit_code = 12


def no_threads() -> BudgetError:
    """Return the error to raise when the system refuses to start more threads or processes."""
    return BudgetError(
        "the system starts no more threads or processes for this user",
        "End some, or raise the limit (`ulimit -u`; a container's pids limit)",
    )


class WorseError(EdgeqError):
    """Report a model that is worse than its baseline by more than the limits allow."""

    exit_code = 13


class InconclusiveError(EdgeqError):
    """Report that the machine was too busy to decide a comparison."""

    exit_code = 14


_SEPARATORS = re.compile(r"[^a-z0-9]+")


def closest(given: str, known: Iterable[str], otherwise: str, *, most: int = 1) -> str:
    """Return a fix for an unknown name: "Did you mean …?" with up to `most` similar names, or `otherwise` if none is
    similar.
    """
    close = difflib.get_close_matches(given, list(known), n=most)
    return f"Did you mean {', '.join(close)}?" if close else otherwise


def suggest(given: str, known: Iterable[str], *, listing: str = "") -> str:
    """Return a fix for an unknown name: "Did you mean …?" with similar names. If none is similar, return `listing`, or
    without it all of `known`.

    A name also counts as similar if it contains the given text, ignoring separators: "pi5" matches "raspberry-pi-5".
    """
    names, part = sorted(set(known) - {"*"}), _joined(given)
    matches = [name for name in names if part in _SEPARATORS.split(name) or (len(part) > 2 and part in _joined(name))]
    matches = matches or difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.6)
    return f"Did you mean {' or '.join(matches)}?" if matches else listing or f"Known: {', '.join(names)}"


def _joined(name: str) -> str:
    return _SEPARATORS.sub("", name.lower())
