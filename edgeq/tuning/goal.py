"""Describe the goal of a tuning run, and its deadline."""

from __future__ import annotations

import copy
import math
import numbers
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from edgeq.errors import UsageError
from edgeq.prove.request import Effort
from edgeq.util.display import Displayed
from edgeq.util.numbers import parse_drop

Objective = Literal["latency", "throughput", "size", "memory"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
DEFAULT_DROP = 0.01
MET, DOUBTFUL, MISSED = range(3)
"""How well the goal is met: certainly, only by uncertain figures, or not at all."""
EQUAL = 0.02
"""Costs that differ by a smaller share than this count as equal, and then the more accurate candidate wins. A race is
too short to settle a smaller difference.
"""
BEHIND = 0.1
"""A candidate that takes longer by this share is behind. On a quiet machine, races minutes apart differ by less."""
SQNR_BEHIND_DB = 6.0
"""A candidate is less accurate if the SQNR of its outputs is lower by this many decibels, which is one bit of every
value.
"""
_ALL = 1_000_000


@dataclass(frozen=True)
class Pace:
    """Set how early a search dismisses candidates that are unlikely to win.

    Attributes:
        halvings: number of rounds that measure accuracy on part of the samples. Each round uses twice as many samples
            as the one before.
        equal: share by which two speeds must differ to count as different. A race need not settle a smaller difference.
        first_races: duration of each of the first races, as a share of the last race's duration.
        behind: a candidate that takes longer by this share is behind.
        twin: if a file is faster in one engine than in the others by this share, other calibration methods are built
            only for that engine.
        threads: if one number of threads is faster than all others by this share in onnxruntime's own kernels, a
            plug-in gets that number without a race, because opening a plug-in may take seconds.
        gain: a second candidate must be faster by this share to be recovered in addition to the first.
        sqnr_db: a candidate is dropped if another one is as fast and has outputs whose SQNR is higher by this many
            decibels.
        alike_db: like `sqnr_db`, but for candidates that one plug-in runs about equally fast. The limit is separate
            because a plug-in may take seconds to compile each calibration method.
        methods: number of calibration methods to try in a plug-in. The same number is tried for a candidate that
            recoveries do not repair.
        recovered: number of structures that are recovered.
        finalists: number of structures in the last race.
        hopeless: multiple of the allowed loss. A candidate is given up if it loses more than that even with as many
            layers in float as it may have.
        prunes: whether recoveries that are not needed are removed again.
        float_sets: largest number of sets of layers in float for which a candidate is built.
        most_float: largest cost of a set of layers in float, as a share of the cost of all layers in float.
    """

    halvings: int = 3
    equal: float = EQUAL
    first_races: float = 0.25
    behind: float = BEHIND
    twin: float = 0.0
    threads: float = 0.5
    gain: float = BEHIND
    sqnr_db: float = SQNR_BEHIND_DB
    alike_db: float = 0.0
    methods: int = 2
    recovered: int = 2
    finalists: int = 4
    hopeless: float = 3.0
    prunes: bool = True
    float_sets: int = _ALL
    most_float: float = 1.0

    @property
    def few_sets(self) -> bool:
        """Return whether the number of sets of layers in float is limited."""
        return self.float_sets < _ALL


THOROUGH = Pace(
    halvings=0,
    equal=0.0,
    first_races=1.0,
    behind=math.inf,
    twin=math.inf,
    threads=math.inf,
    gain=0.0,
    sqnr_db=math.inf,
    alike_db=math.inf,
    methods=_ALL,
    recovered=_ALL,
    finalists=_ALL,
    hopeless=math.inf,
)
"""Nothing is dismissed early."""
EFFORTS: Mapping[Effort, Pace] = {
    "quick": Pace(sqnr_db=3.0, recovered=1, hopeless=math.inf, prunes=False, float_sets=0),
    "default": Pace(sqnr_db=3.0, recovered=1, hopeless=math.inf, prunes=False, float_sets=8, most_float=0.9),
    "thorough": Pace(hopeless=math.inf, most_float=0.9),
}
"""How much work edgeq may do to repair a poor result. "quick" keeps no layers in float, "default" builds a few sets of
layers in float, and "thorough" compares more of everything. None of them puts almost all layers in float, because such
a model is hardly quantized.
"""


@dataclass(frozen=True)
class Goal(Displayed):
    """Define the goal of a search: among the candidates that lose at most `max_drop` and are not slower than float32,
    find the one that is best by `objective`.

    Attributes:
        objective: the quantity to optimize.
        max_drop: accuracy that may be lost, as a fraction of the metric's own scale: 0.01 is one point of top-1.
        budget_s: wall-clock seconds; None means no limit.
        thorough: whether to dismiss nothing early. If so, each candidate is assessed on all samples, races continue
            until the order is settled, and candidates far behind in SQNR or speed are followed up as well.
        strict: whether to choose only a candidate that certainly meets the goal. Otherwise the search chooses the
            candidate nearest to the goal and names what is in doubt.
    """

    objective: Objective = "latency"
    max_drop: float = DEFAULT_DROP
    budget_s: float | None = None
    thorough: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UsageError(f"objective is {self.objective!r}", f"It can be {', '.join(OBJECTIVES)}")
        for name, number in (("max_drop", self.max_drop), ("budget_s", self.budget_s)):
            if number is not None and not isinstance(number, numbers.Real):
                raise UsageError(
                    f"{name} is {number!r}", f"Give a number: {name}={'0.01' if name == 'max_drop' else '60'}"
                )
        parse_drop(self.max_drop)
        if self.budget_s is not None and not self.budget_s > 0:
            raise UsageError(f"the budget is {self.budget_s} seconds", "Give more than 0")


def as_goal(given: Goal | str | None, *, max_drop: float | None = None, budget: str | float | None = None) -> Goal:
    """Return `given` as a goal. `given` may be just an objective, such as "size". None means the default goal.

    Args:
        max_drop, budget: values that replace the goal's own. The budget is in seconds, or text such as "90s" or "10m".

    Raises:
        UsageError: the objective is unknown, a value is not a goal, or a limit is impossible.
    """
    if given is not None and not isinstance(given, Goal | str):
        raise UsageError(
            f"the goal is given as {type(given).__name__}", "Give edgeq.Goal(objective=..., max_drop=..., budget_s=...)"
        )
    goal = given if isinstance(given, Goal) else Goal(cast(Objective, given or "latency"))
    seconds = parse_budget(budget) if isinstance(budget, str) else budget
    return replace(
        goal,
        max_drop=goal.max_drop if max_drop is None else max_drop,
        budget_s=goal.budget_s if seconds is None else seconds,
    )


def parse_budget(text: str | None) -> float | None:
    """Return seconds from "90", "90s", "10m", "1.5h" or "1h30m"."""
    if text is None:
        return None
    pattern = r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?"
    found = re.fullmatch(pattern, text.strip())
    parts = found.groupdict(default="0") if found and text.strip() else {}
    seconds = sum(float(parts[unit]) * scale for unit, scale in (("h", 3600), ("m", 60), ("s", 1)) if parts)
    if not 0 < seconds < math.inf:
        raise UsageError(f"--budget {text!r} is not a time span", "Write 90s, 10m or 1h30m")
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
        part = copy.copy(self)
        part._budget = None if self._budget is None else share * self._budget
        return part

    def passed(self) -> bool:
        """Return whether the budget is used up."""
        return self._budget is not None and self.elapsed_s >= self._budget

    def left_s(self, most: float = float("inf")) -> float:
        """Return the seconds until the budget is used up, but at least 0 and at most `most`."""
        if self._budget is None:
            return most
        return max(0.0, min(most, self._budget - self.elapsed_s))
