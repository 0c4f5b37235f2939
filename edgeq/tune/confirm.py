"""What this machine's kernels say of a candidate, confirmed or refuted by a simulator of the target.

A simulator takes a thousand times as long, so the search reads the file with this machine's kernels, which differ by
roundings where all is well. Where all is not, nothing but the simulator shows it. So each candidate that is about to be
chosen runs there too, and the simulator's figure takes the place of the other.
"""

from __future__ import annotations

from edgeq.errors import RuntimeUnavailableError
from edgeq.progress import Progress
from edgeq.report.tuning_record import Assessment
from edgeq.tune.evaluator import Evaluator
from edgeq.tune.explain import in_simulator, points
from edgeq.tune.goal import Deadline
from edgeq.tune.record import Trial
from edgeq.tune.trials import TrialTable


def confirm(table: TrialTable, evaluator: Evaluator, deadline: Deadline, progress: Progress) -> None:
    """Run what qualifies in the simulator, the best first, until one holds there; the others need not."""
    holds: Trial | None = None
    for place, trial in enumerate(table.qualified()):
        if holds is not None:
            if trial.simulated is None:
                reason = f"not simulated: {holds.name} holds and costs no more"
                table.update(trial.name, status="qualified", reason=reason)
        elif place and deadline.passed():
            table.eliminate(trial.name, "the budget ran out before it was simulated")
        else:
            found = in_simulation(table, evaluator, trial, deadline, progress)
            if table.meets(found) and not found.reason:
                if found.simulated is None:  # nothing simulates it
                    return
                holds = found


def in_simulation(
    table: TrialTable, evaluator: Evaluator, trial: Trial, deadline: Deadline, progress: Progress
) -> Trial:
    """`trial` with the simulator's figure, where there is a simulator and this machine's kernels keep the accuracy."""
    if evaluator.timed or trial.simulated is not None or not table.meets(trial):
        return trial
    try:
        found = evaluator.simulate(trial.candidate, table.goal.max_drop, deadline.left_s())
    except RuntimeUnavailableError as error:
        table.eliminate(trial.name, error.problem)
        return table.update(trial.name, assessment=None)
    if found is None:
        return trial
    trial = table.update(trial.name, simulated=found)
    progress.note(f"{trial.name} {in_simulator(found)}")
    if not table.meets(trial):
        reason = f"{in_simulator(found)}; {points(table.goal.max_drop)} are allowed"
        return table.update(trial.name, status="short", reason=reason)
    surer = _surer(table, found)
    if surer is not None:
        reason = f"{in_simulator(found)}; {surer.name} holds on more"
        trial = table.update(trial.name, status="qualified", reason=reason)
    return trial


def _surer(table: TrialTable, found: Assessment) -> Trial | None:
    """One that holds in the simulator on more samples than `found`, which the end of the budget may have cut short:
    where it is not sure to hold, few samples may be luck."""
    if found.high <= table.goal.max_drop:
        return None
    return next((t for t in table.qualified() if t.simulated and t.simulated.samples > found.samples), None)
