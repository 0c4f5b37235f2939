"""What runs where the winner's engine is not installed: the best candidate of onnxruntime's own kernels that keeps the
accuracy asked for and is faster than float32."""

from __future__ import annotations

from edgeq.tune.engines import same_file
from edgeq.tune.evaluator import Evaluator
from edgeq.tune.goal import Deadline
from edgeq.tune.record import Trial
from edgeq.tune.screening import build
from edgeq.tune.timing import MOST_S, not_slower, race
from edgeq.tune.trials import TIE, TrialTable

_TRIED = 3


def fall_back(
    table: TrialTable, evaluator: Evaluator, deadline: Deadline, winner: Trial | None, float_threads: int
) -> str:
    """The name of the candidate that stands in for `winner`, of which the same file comes first; "" where the winner
    needs no plug-in, and where float32 has to do. Those that were dropped for a faster engine are measured now."""
    choice = winner.candidate.engine if winner is not None else None
    if winner is None or choice is None:
        return ""
    twin = winner.candidate.replace(name=winner.name.replace(f" in {choice.name}", ""), engine=None)
    if twin.quantized and twin.name not in table and not deadline.passed():
        build(table, evaluator, twin.replace(threads=0), "recovery", winner.name)
    own = [t for t in table if t.screening and t.candidate.engine is None and t.candidate.quantized]
    own.sort(key=lambda t: (not same_file(t, winner), table.cost(t)))
    for trial in own[:_TRIED]:
        if deadline.passed():
            break
        if trial.timing is None:
            race(table, evaluator, [trial], float_threads, tie=TIE, seconds=deadline.left_s(MOST_S / 4))
        if not not_slower(table[trial.name], strict=True):
            continue
        if trial.assessment is None or not trial.assessment.complete:
            found = evaluator.assess([trial.candidate], evaluator.total)
            trial = table.update(trial.name, assessment=found[trial.name])
        if table.meets(trial):
            role = f"the fall-back where {choice.engine.name} is not installed"
            reason = "; ".join(filter(None, (table[trial.name].reason, role)))
            return table.update(trial.name, status="qualified", reason=reason).name
    return ""
