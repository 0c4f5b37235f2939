"""Candidates built and looked at: what does not load, computes nothing in int8, is there already or is far from
float32's outputs is dropped before anything is measured at length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgeq.errors import BoardError, EdgeqError
from edgeq.hardware.profile import Profile
from edgeq.report.tuning_record import Screening, Stage
from edgeq.tune.candidate import Candidate
from edgeq.tune.engines import same_file
from edgeq.tune.evaluator import Evaluator
from edgeq.tune.explain import unmeasured
from edgeq.tune.goal import Deadline
from edgeq.tune.record import Trial, relative_latency
from edgeq.tune.space import in_own_kernels, method_candidates
from edgeq.tune.trials import BY_TIME, TrialTable, sqnr_of, structure_of

# Of candidates that cost the same, one whose outputs are this much further from float32's is not worth measuring.
_SQNR_BEHIND_DB = 6.0
# Calibration methods that are tried in an engine besides the first one's.
_METHODS_IN_ENGINE = 2


def build_all(table: TrialTable, evaluator: Evaluator, deadline: Deadline, candidates: Iterable[Candidate]) -> None:
    """Build `candidates` in their order until the deadline; at least the first."""
    for position, candidate in enumerate(candidates):
        if position > 0 and deadline.passed():
            table.add(candidate)
            table.eliminate(candidate.name, "the budget ran out before it was built")
        else:
            build(table, evaluator, candidate)


def build(
    table: TrialTable, evaluator: Evaluator, candidate: Candidate, stage: Stage = "space", parent: str = ""
) -> bool:
    """Build one candidate and enter it in the table; whether it is still in the run."""
    if candidate.name in table:
        return not table[candidate.name].reason
    table.add(candidate, stage, parent)
    screening = _screened(evaluator, candidate)
    if isinstance(screening, EdgeqError):
        table.eliminate(candidate.name, screening.problem)
        return False
    duplicate = next((t for t in table if t.screening and t.screening.content == screening.content), None)
    table.update(candidate.name, screening=screening)
    if duplicate is not None:
        table.eliminate(candidate.name, f"the same model as {duplicate.name}")
    elif screening.int8_mac_share == 0 and candidate.quantized:
        table.eliminate(candidate.name, "nothing of it runs in int8")
    table.timed(table[candidate.name])
    return not table[candidate.name].reason


def _screened(evaluator: Evaluator, candidate: Candidate) -> Screening | EdgeqError:
    """What building a candidate shows, or why it cannot be built."""
    try:
        return evaluator.build(candidate)
    except BoardError:  # it says nothing of the candidate
        raise
    except EdgeqError as error:
        return error


def build_methods(table: TrialTable, evaluator: Evaluator, deadline: Deadline, profile: Profile) -> None:
    """Other calibration methods for the kernel choices that are worth it, and of each structure the promising ones; in
    a thorough search for all, and all of them."""
    thorough = table.goal.thorough
    if not thorough:
        _drop_dominated(table)
    for kernel in table.alive():
        if not thorough and _has_faster_twin(table, kernel):
            continue
        methods = method_candidates(kernel.candidate, profile)
        if kernel.candidate.engine is not None and not thorough:
            methods = _closest(methods, evaluator, deadline)
        build_all(table, evaluator, deadline, [c.replace(threads=kernel.candidate.threads) for c in methods])
    if not thorough:
        _drop_distant(table)


def _has_faster_twin(table: TrialTable, kernel: Trial) -> bool:
    """Whether the same file is faster in another engine, or in another precision: its accuracy is hardly another, so it
    is enough to look for it once."""
    twins = (other for other in table.alive() if same_file(kernel, other) and not unmeasured(kernel, other))
    return any(relative_latency(twin) < relative_latency(kernel) for twin in twins)


def _drop_distant(table: TrialTable) -> None:
    """Of each structure, what is far behind the closest to float32."""
    for structure in dict.fromkeys(structure_of(t) for t in table.alive()):
        group = [t for t in table.alive() if structure_of(t) == structure]
        best = max(group, key=sqnr_of)
        for trial in group:
            behind = sqnr_of(best) - sqnr_of(trial)
            if behind > _SQNR_BEHIND_DB:
                why = f"as fast as {best.name}, and its outputs' SQNR is {behind:.0f} dB lower"
                table.eliminate(trial.name, why)


def _closest(candidates: Sequence[Candidate], evaluator: Evaluator, deadline: Deadline) -> tuple[Candidate, ...]:
    """Of those that are built until the deadline, the ones whose files follow float32 most closely in onnxruntime's own
    kernels: an engine may take seconds to compile each."""
    found: list[tuple[float, Candidate]] = []
    for candidate in candidates:
        if deadline.passed():
            break
        screening = _screened(evaluator, in_own_kernels(candidate))
        # The engine may take what these kernels refuse.
        found.append((float("inf") if isinstance(screening, EdgeqError) else screening.sqnr_db, candidate))
    best = sorted(found, key=lambda pair: -pair[0])[:_METHODS_IN_ENGINE]
    return tuple(candidate for _, candidate in best)


def _drop_dominated(table: TrialTable) -> None:
    """Kernel choices that are no cheaper than another one whose outputs are far closer to float32's. Where the cost is
    a speed that cannot be claimed, both stay; the float model in another engine is always closer."""
    for trial in table.alive():
        for other in table.alive():
            behind = sqnr_of(other) - sqnr_of(trial)
            known = table.objective not in BY_TIME or not unmeasured(trial, other)
            if known and not table.cheaper(trial, other) and behind > _SQNR_BEHIND_DB:
                why = (
                    f"no better than {other.name} in {table.objective}, and its outputs' SQNR is {behind:.0f} dB lower"
                )
                table.eliminate(trial.name, why)
                break
