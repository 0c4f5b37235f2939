"""The searches of a run: a narrowed one where earlier runs left evidence, the whole one where that does not suffice;
each again without an engine that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgeq.errors import EngineError
from edgeq.progress import Progress
from edgeq.tune.engines import Field
from edgeq.tune.evaluator import Evaluator
from edgeq.tune.goal import Deadline, Goal
from edgeq.tune.memory import Memory, Space
from edgeq.tune.record import Outcome
from edgeq.tune.search import search


@dataclass(frozen=True)
class Searched:
    """What was found.

    Attributes:
        field: the engines that were left at the end.
        memory: for the tuning record: the models whose evidence was used, and whether it held here; None with a reason
            where no speed could be claimed. Empty where none was used.
    """

    outcome: Outcome
    field: Field
    memory: dict[str, Any]


@dataclass(frozen=True)
class Searches:
    """What every search of a run has in common.

    Attributes:
        threads: numbers of threads inside an operator to compare.
        failed: gives the names of the engines whose processes have ended.
    """

    evaluator: Evaluator
    goal: Goal
    threads: Sequence[int]
    failed: Callable[[], Iterable[str]]
    progress: Progress

    def best(self, space: Space, memory: Memory, budget_s: float | None) -> Searched:
        """Search what `memory` has first, and all of `space` where nothing of it holds.

        Args:
            budget_s: seconds for everything; None is no limit.

        Raises:
            EngineError: the only engine failed.
        """
        total, narrow, note = Deadline(budget_s), memory.narrowed(space), {}
        if narrow is not None:
            names = ", ".join(dict.fromkeys(e.model for e in memory.evidence))
            self.progress.note(f"beginning with what won on {names}; --no-memory leaves that out")
            outcome, left = self._searched(narrow, total)
            held, unclear = memory.confirmed(outcome), memory.unmeasured(outcome)
            note = {"models": [e.model for e in memory.evidence], "confirmed": held}
            if held:
                return Searched(outcome, left, note)
            if unclear:
                note |= {"confirmed": None, "reason": unclear}
                self.progress.note(f"it could not be confirmed here: {unclear}; the whole search follows")
            else:
                self.progress.note("it does not do as well here: the whole search follows")
            space = replace(space, field=space.field.without(self.failed()))
        rest = Deadline(None if budget_s is None else total.left_s())
        outcome, left = self._searched(space, rest)
        return Searched(outcome, left, note)

    def _searched(self, space: Space, deadline: Deadline) -> tuple[Outcome, Field]:
        """What is best in `space`, and the engines that were left at the end."""
        while True:
            where = (space.candidates, space.profile, self.evaluator, self.goal, deadline)
            try:
                outcome = search(*where, threads=self.threads, engines=space.field, progress=self.progress)
                return outcome, space.field
            except EngineError as error:
                left = space.field.without(self.failed())
                if not space.field.own or left == space.field:
                    raise
                # What was measured so far is in the journal, and is not measured again.
                self.progress.note(f"{error.problem}; the search goes on without it")
                space = replace(space, field=left)
