"""Samples as a user names them, in one value."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from edgeq.display import Displayed
from edgeq.errors import UsageError


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
        """The four fields, with the arguments in place of those that are None."""
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
