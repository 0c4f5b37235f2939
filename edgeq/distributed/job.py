"""What a worker is given to do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol, TypeVar

Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Job(Protocol[Item, Result]):
    """What workers do. It travels to each of them by pickle, once."""

    def open(self, stack: ExitStack) -> Callable[[Item], Result]:
        """Make ready, in a worker; what is to be closed when it ends goes onto `stack`."""
        ...
