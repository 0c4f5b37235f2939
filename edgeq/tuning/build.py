"""Build candidates, and drop some of them before any long measurement: candidates that do not load, that compute
nothing in int8, that are duplicates, or whose outputs are far from float32's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from edgeq.errors import BoardError, EdgeqError
from edgeq.hardware.profile import Profile
from edgeq.tuning.measurements import Screening, Stage
from edgeq.tuning.sentences import describe_unclaimed
from edgeq.tuning.space import Candidate, engine_name, method_candidates
from edgeq.tuning.trials import Trial, Trials, group_by_structure


def build_all(trials: Trials, candidates: Iterable[Candidate]) -> None:
    """Build `candidates` in their order until the deadline. The first one is always built."""
    for position, candidate in enumerate(candidates):
        if position > 0 and trials.deadline.passed():
            trials.add(candidate)
            trials.eliminate(candidate.name, "the budget ran out before it was built")
        else:
            build(trials, candidate)


def build(trials: Trials, candidate: Candidate, stage: Stage = "space", parent: str = "") -> bool:
    """Build one candidate and add it to the run. Return whether it is still in the run after the first checks."""
    name = candidate.name
    if name in trials:
        return not trials[name].reason
    # Add it before it is built: a candidate that cannot be built belongs in the record as well.
    trials.add(candidate, stage, parent)
    screening = _screen(trials, candidate)
    if isinstance(screening, EdgeqError):
        trials.eliminate(name, screening.problem)
        return False
    # Two schemes may write the same file, for example if nothing in the model has the type that differs.
    duplicate = next((t for t in trials if t.screening and t.screening.content == screening.content), None)
    if duplicate is not None:
        trials.eliminate(name, f"the same model as {duplicate.name}")
    elif screening.int8_mac_share == 0 and candidate.quantized:
        trials.eliminate(name, "none of it runs in int8")
    # Record the screening last: the trial would otherwise count as its own duplicate.
    trials.record_screening(name, screening)
    return not trials[name].reason


def _screen(trials: Trials, candidate: Candidate) -> Screening | EdgeqError:
    """Return the screening of a candidate, or the error if the candidate cannot be built."""
    try:
        return trials.evaluator.build(candidate)
    except BoardError:  # the board failed, not the candidate
        raise
    except EdgeqError as error:
        return error


def build_forms(trials: Trials, profile: Profile) -> None:
    """Build the other calibration methods of each kernel choice in the run, and its repaired form: the method whose
    outputs are closest to float32's, with all recoveries that cost no time on the device. Keep only the promising forms
    of each structure.

    A plug-in may take seconds to compile each file. So a choice that runs in a plug-in gets only a few methods, those
    whose files follow float32 most closely in onnxruntime's own kernels. Methods differ only in the ranges of
    activations, which are the same for every kernel choice.
    """
    _drop_dominated(trials)
    # Onnxruntime's own kernels come first, because their builds show which methods are the closest.
    for kernel in sorted(trials.alive(), key=lambda t: t.candidate.engine is not None):
        methods: Sequence[Candidate] = method_candidates(kernel.candidate, profile)
        if kernel.candidate.engine is not None:
            methods = _select_closest_methods(trials, methods)
        names = [kernel.name, *(c.name for c in methods)]
        build_all(trials, [c.replace(threads=kernel.candidate.threads) for c in methods])
        closest = max((trials[name] for name in names), key=lambda t: t.sqnr_db)
        if (repaired := add_free_recoveries(trials, closest.candidate)) is not None and not trials.deadline.passed():
            build(trials, repaired, "recovery", closest.name)
    for group in group_by_structure(trials.alive()):
        best = max(group, key=lambda t: t.sqnr_db)
        for trial in group:
            if (lower := best.sqnr_db - trial.sqnr_db) > trials.pace.sqnr_db:
                why = f"as fast as {best.name}, and its outputs' SQNR is {lower:.0f} dB lower"
                trials.eliminate(trial.name, why)


def add_free_recoveries(trials: Trials, candidate: Candidate) -> Candidate | None:
    """Return `candidate` with all recoveries that cost no time on the device; None if none applies to it."""
    groups = trials.evaluator.recovery_groups()
    if candidate.scheme.mode != "static" or candidate.builder or not groups or not groups[0]:
        return None
    return candidate.replace(name=f"{candidate.name} + recovery", recoveries=groups[0])


def is_same_file(trial: Trial, twin: Trial) -> bool:
    """Return whether two trials run the same file, either in different engines or in one engine with different
    precisions.
    """
    a, b = (t.candidate.replace(name="", threads=0, engine=None) for t in (trial, twin))
    return trial.candidate.engine != twin.candidate.engine and a == b


def _select_closest_methods(trials: Trials, variants: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the few candidates of `variants` whose calibration methods follow float32 most closely in onnxruntime's
    own kernels. Return all of them if no kernel choice of these kernels is in the run.
    """
    # Of several methods that give the same file, only one is in the run.
    own = [t for t in trials.alive() if t.candidate.engine is None and not t.candidate.recoveries]
    sqnr_db = {_method_key(t.candidate): t.sqnr_db for t in sorted(own, key=lambda t: t.sqnr_db)}
    ranked = sorted(variants, key=lambda c: -sqnr_db.get(_method_key(c), -math.inf))
    return [c for c in ranked if not sqnr_db or _method_key(c) in sqnr_db][: trials.pace.methods if sqnr_db else None]


def _method_key(candidate: Candidate) -> str:
    return f"{candidate.scheme.method} {sorted(candidate.scheme.method_options.items())}"


def _drop_dominated(trials: Trials) -> None:
    """Drop a kernel choice if another one of its engine is at least as cheap and has outputs that are far closer to
    float32's. If a plug-in runs two about as fast, drop the one whose outputs are further from float32's. If the cost
    is a speed that cannot be claimed, keep both.
    """
    for trial in trials.alive():
        for rival in trials.alive():
            if engine_name(trial.candidate) != engine_name(rival.candidate):
                continue
            compiled = trials.by_time and trial.candidate.engine and trial.candidate.quantized
            margin_db = trials.pace.alike_db if compiled and rival.candidate.quantized else trials.pace.sqnr_db
            comparable = not trials.by_time or not describe_unclaimed(trial, rival)
            lower = rival.sqnr_db - trial.sqnr_db
            if comparable and lower > margin_db and not trials.is_cheaper(trial, rival):
                why = f"no better than {rival.name} in {trials.objective}"
                trials.eliminate(trial.name, f"{why}, and its outputs' SQNR is {lower:.0f} dB lower")
                break
