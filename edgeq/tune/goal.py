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
from edgeq.util.display import Displayed

Objective = Literal["latency", "throughput", "size", "memory"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
DEFAULT_DROP = 0.01
MET, DOUBTFUL, MISSED = range(3)
"""The goal is met beyond doubt; by the figures, which are not sure; or it is not met."""
EQUAL = 0.02
"""Costs that differ by less, as a share, are equal, and the more accurate candidate wins: in the seconds that there are
for a race, no smaller difference is settled."""
BEHIND = 0.1
"""A candidate that takes longer by this share is behind: two races minutes apart differ by less on a quiet machine."""
SQNR_BEHIND_DB = 6.0
"""A candidate whose outputs are further from float32's by this is less accurate: one bit of every value."""
_ALL = 1_000_000


@dataclass(frozen=True)
class Pace:
    """Set how early a search dismisses candidates that are unlikely to win.

    Attributes:
        halvings: rounds of accuracy on fewer than all samples, each on twice as many as the one before.
        equal: share within which a race need not settle an order.
        first_races: share of the last race's seconds that each of the first races gets.
        behind: share by which a candidate that is behind takes longer.
        twin: share by which a file must be faster in one engine to get calibration methods there alone.
        threads: share by which any other number of threads must be slower for a plug-in to get the number that suits
            onnxruntime's own kernels: it may take seconds to open.
        gain: share by which a second candidate must be faster to be recovered next to the first.
        sqnr_db: how much further from float32's the outputs of what is dropped for its accuracy are.
        alike_db: the same for what a plug-in runs about as fast: each calibration method takes it seconds to compile.
        methods: calibration methods that are tried in a plug-in, and of what recoveries leave short.
        recovered: structures that are recovered.
        finalists: structures in the last race.
        hopeless: times the loss allowed; a candidate that loses more with all layers in float that may be is given up.
        prunes: whether recoveries that are not needed are left out again.
        float_sets: sets of layers in float that are built of one candidate.
        most_float: share of the cost of all layers in float that such a set may have.
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
        """Return whether few sets of layers in float are built."""
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
Effort = Literal["quick", "default", "thorough"]
EFFORTS: Mapping[Effort, Pace] = {
    "quick": Pace(sqnr_db=3.0, recovered=1, hopeless=math.inf, prunes=False, float_sets=0),
    "default": Pace(sqnr_db=3.0, recovered=1, hopeless=math.inf, prunes=False, float_sets=8, most_float=0.9),
    "thorough": Pace(hopeless=math.inf, most_float=0.9),
}
"""What a repair of a poor result may take: the first leaves layers in float out, the second builds a few sets of them,
the last compares more of everything. What is almost all in float is not worth its name."""


def check_effort(given: str | None) -> None:
    """Refuse an effort that is not known; None: no repair.

    Raises:
        UsageError: names those that there are.
    """
    if given is not None and given not in EFFORTS:
        raise UsageError(f"effort is {given!r}", f"It can be {', '.join(EFFORTS)}, or None for the plain build")


@dataclass(frozen=True)
class Goal(Displayed):
    """Define the goal: the best candidate by `objective` among those that lose at most `max_drop` and are not slower
    than float32.

    Attributes:
        objective: what is made as good as possible.
        max_drop: accuracy that may be lost, as a fraction of the metric's own scale: 0.01 is one point of top-1.
        budget_s: wall-clock seconds; None takes as long as it takes.
        thorough: whether nothing is dismissed early: each candidate is assessed on all samples, races go on until the
            order is settled, and what is far behind in SQNR or speed is followed up too.
        strict: whether only what meets the goal beyond doubt is chosen. Otherwise what comes nearest is, and its doubts
            are named.
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
        if not 0 <= self.max_drop <= 1:
            raise UsageError(f"the largest drop is {self.max_drop}", "It lies between 0 and 1")
        if self.budget_s is not None and not self.budget_s > 0:
            raise UsageError(f"the budget is {self.budget_s} seconds", "Give more than 0")


def as_goal(given: Goal | str | None, *, max_drop: float | None = None, budget: str | float | None = None) -> Goal:
    """Return `given` as a goal: it may be an objective alone, such as "size"; None is the default goal.

    Args:
        max_drop, budget: replace the goal's own; the budget in seconds, or as text such as "90s" or "10m".

    Raises:
        UsageError: an unknown objective, something that is not a goal, or a limit that makes no sense.
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


class Deadline:
    """Track the remaining budget. The clock starts when this is made.

    Args:
        budget_s: wall-clock seconds; None never ends.
        clock: gives seconds.
    """

    def __init__(self, budget_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget_s
        self._clock = clock
        self._start = clock()

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the clock started."""
        return self._clock() - self._start

    def until(self, share: float) -> Deadline:
        """Return the end of the first `share` of this budget, by the same clock."""
        part = copy.copy(self)
        part._budget = None if self._budget is None else share * self._budget
        return part

    def passed(self) -> bool:
        """Return whether the budget is used up."""
        return self._budget is not None and self.elapsed_s >= self._budget

    def left_s(self, most: float = float("inf")) -> float:
        """Return seconds until the budget is used up, at most `most`; never negative."""
        if self._budget is None:
            return most
        return max(0.0, min(most, self._budget - self.elapsed_s))
