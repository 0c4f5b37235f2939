"""Define the goal of a tuning run: what to optimize, and how much accuracy may be lost for it."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from edgeq.errors import UsageError
from edgeq.measure.task import Task
from edgeq.tuning.budget import parse_budget
from edgeq.util.display import Displayed
from edgeq.util.numbers import parse_drop

Objective = Literal["latency", "throughput", "size", "memory"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
DEFAULT_DROP = 0.01
MET, DOUBTFUL, MISSED = range(3)
"""How well the goal is met: certainly, only by uncertain figures, or not at all."""


@dataclass(frozen=True)
class Goal(Displayed):
    """Define the goal of a search: among the candidates that lose at most `max_drop` and are not slower than float32,
    find the one that is best by `objective`.

    Attributes:
        objective: the quantity to optimize.
        max_drop: accuracy that may be lost, as a fraction of the metric's own scale: 0.01 is one point of top-1. None
            takes the default of the task.
        budget_s: wall-clock seconds; None means no limit.
        thorough: whether to dismiss nothing early. If so, each candidate is assessed on all samples, races continue
            until the order is settled, and candidates far behind in SQNR or speed are followed up as well.
        strict: whether to choose only a candidate that certainly meets the goal. Otherwise the search chooses the
            candidate nearest to the goal and names what is in doubt.
    """

    objective: Objective = "latency"
    max_drop: float | None = None
    budget_s: float | None = None
    thorough: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UsageError(f"objective is {self.objective!r}", f"It can be {', '.join(OBJECTIVES)}")
        for name, number in (("max_drop", self.max_drop), ("budget_s", self.budget_s)):
            # Dataclasses do not check types, and a text as a limit would fail only after hours, in a comparison.
            if number is not None and not isinstance(number, numbers.Real):
                raise UsageError(
                    f"{name} is {number!r}", f"Give a number: {name}={'0.01' if name == 'max_drop' else '60'}"
                )
        parse_drop(self.max_drop)
        if self.budget_s is not None and not self.budget_s > 0:
            raise UsageError(f"the budget is {self.budget_s} seconds", "Give more than 0")

    @property
    def limit(self) -> float:
        """Return the accuracy that may be lost, as a fraction."""
        return DEFAULT_DROP if self.max_drop is None else self.max_drop

    def settled(self, task: Task | None) -> Goal:
        """Return the goal with the limit that it has for a task."""
        return replace(self, max_drop=allowed_drop(self.max_drop, task))


def allowed_drop(max_drop: float | None, task: Task | None) -> float:
    """Return the loss of accuracy that the user allows, or else the default of the task, as a fraction."""
    return getattr(task, "default_drop", DEFAULT_DROP) if max_drop is None else max_drop


def as_goal(goal: Goal | str | None, *, max_drop: float | None = None, budget: str | float | None = None) -> Goal:
    """Return `goal` as a goal. `goal` may be just an objective, such as "size". None means the default goal.

    Args:
        max_drop, budget: values that replace the goal's own. The budget is in seconds, or text such as "90s" or "10m".

    Raises:
        UsageError: the objective is unknown, a value is not a goal, or a limit is impossible.
    """
    if goal is not None and not isinstance(goal, Goal | str):
        raise UsageError(
            f"the goal is given as {type(goal).__name__}", "Give edgeq.Goal(objective=..., max_drop=..., budget_s=...)"
        )
    base = goal if isinstance(goal, Goal) else Goal(cast(Objective, goal or "latency"))
    # The command line gives text, Python may give seconds.
    seconds = parse_budget(budget) if isinstance(budget, str) else budget
    return replace(
        base,
        max_drop=base.max_drop if max_drop is None else max_drop,
        budget_s=base.budget_s if seconds is None else seconds,
    )
