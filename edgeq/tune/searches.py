"""The searches of a run: a narrowed one where earlier runs left evidence, the whole one where that does not suffice;
each again without an engine that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from edgeq.errors import EngineError
from edgeq.progress import Progress
from edgeq.tune.engines import Field
from edgeq.tune.goal import Deadline
from edgeq.tune.memory import Memory, Space
from edgeq.tune.record import Outcome

SearchIn = Callable[[Space, Deadline], Outcome]


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


def find_best(
    space: Space,
    memory: Memory,
    search_in: SearchIn,
    failed: Callable[[], Iterable[str]],
    budget_s: float | None,
    progress: Progress,
) -> Searched:
    """Search what `memory` has first, and all of `space` where nothing of it holds.

    Args:
        failed: names of the engines whose processes have ended.
        budget_s: seconds for everything; None is no limit.

    Raises:
        EngineError: the only engine failed.
        EdgeqError: as `search_in`.
    """
    total, narrow, note = Deadline(budget_s), memory.narrowed(space), {}
    if narrow is not None:
        names = ", ".join(dict.fromkeys(e.model for e in memory.evidence))
        progress.note(f"beginning with what won on {names}; --no-memory leaves that out")
        outcome, left = _searched(narrow, search_in, failed, total, progress)
        held, unclear = memory.confirmed(outcome), memory.unmeasured(outcome)
        note = {"models": [e.model for e in memory.evidence], "confirmed": held}
        if held:
            return Searched(outcome, left, note)
        if unclear:
            note |= {"confirmed": None, "reason": unclear}
            progress.note(f"it could not be confirmed here: {unclear}; the whole search follows")
        else:
            progress.note("it does not do as well here: the whole search follows")
        space = replace(space, field=space.field.without(failed()))
    rest = Deadline(None if budget_s is None else total.left_s())
    outcome, left = _searched(space, search_in, failed, rest, progress)
    return Searched(outcome, left, note)


def _searched(
    space: Space, search_in: SearchIn, failed: Callable[[], Iterable[str]], deadline: Deadline, progress: Progress
) -> tuple[Outcome, Field]:
    while True:
        try:
            return search_in(space, deadline), space.field
        except EngineError as error:
            left = space.field.without(failed())
            if not space.field.own or left == space.field:
                raise
            # What was measured so far is in the journal, and is not measured again.
            progress.note(f"{error.problem}; the search goes on without it")
            space = replace(space, field=left)
