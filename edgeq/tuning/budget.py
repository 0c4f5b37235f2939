"""Read the time budget of a run, and track what remains of it."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable

from edgeq.errors import UsageError


def parse_budget(text: str | None) -> float | None:
    """Return seconds from "90", "90s", "10m", "1.5h" or "1h30m"."""
    if text is None:
        return None
    pattern = r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?"
    match = re.fullmatch(pattern, text.strip())
    parts = match.groupdict(default="0") if match and text.strip() else {}
    seconds = sum(float(parts[unit]) * scale for unit, scale in (("h", 3600), ("m", 60), ("s", 1)) if parts)
    # Text that is empty or does not match counts as 0 seconds here.
    if not 0 < seconds < math.inf:
        raise UsageError(f"⟨budget⟩ {text!r} is not a time span", "Write 90s, 10m or 1h30m")
    return seconds


class BudgetClock:
    """Track the remaining budget. The clock starts when the object is created.

    Args:
        budget_s: wall-clock seconds; None means no limit.
        clock: a function that returns the time in seconds.
    """

    def __init__(self, budget_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget_s
        self._clock = clock
        self._start = clock()

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the clock started."""
        return self._clock() - self._start

    def until(self, share: float) -> BudgetClock:
        """Return a deadline on the same clock that passes when the first `share` of this budget is used up."""
        # A copy keeps the start, so that all stages measure their share from the beginning of the run.
        part = copy.copy(self)
        part._budget = None if self._budget is None else share * self._budget
        return part

    def passed(self) -> bool:
        """Return whether the budget is used up."""
        return self._budget is not None and self.elapsed_s >= self._budget

    def remaining_s(self, limit: float = float("inf")) -> float:
        """Return the seconds until the budget is used up, but at least 0 and at most `limit`."""
        if self._budget is None:
            return limit
        return max(0.0, min(limit, self._budget - self.elapsed_s))
