"""A clock that tests turn by hand, so that nothing here depends on how fast this machine is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import cycle

import pytest


class SyntheticClock:
    """Seconds that pass only when a runner runs or somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += max(seconds, 1e-6)

    def runner(self, latencies: Iterable[float], log: list[str] | None = None, name: str = "") -> Callable[[], None]:
        """A runner whose runs take these seconds, over and over."""
        taken = cycle(latencies)

        def run() -> None:
            self.now += next(taken)
            if log is not None:
                log.append(name)

        return run


@pytest.fixture
def clock() -> SyntheticClock:
    return SyntheticClock()
