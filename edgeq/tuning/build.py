"""Build candidates, and drop some of them before any long measurement: candidates that do not load, that compute
nothing in int8, that are duplicates, or whose outputs are far from float32's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgeq.errors import BoardError, EdgeqError
from edgeq.hardware.profile import Profile
from edgeq.tuning.comparison import is_outrun
from edgeq.tuning.measurements import Screening, Stage
from edgeq.tuning.sentences import describe_unclaimed
from edgeq.tuning.space import Candidate, in_own_kernels, method_candidates
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


def build_methods(trials: Trials, profile: Profile) -> None:
    """Build other calibration methods for the kernel choices that are worth it. Keep only the promising methods of each
    structure.

    An engine may take seconds to compile each file. So two groups of kernel choices get only a few methods: choices
    that run in a plug-in engine, and choices that are slower than one of those. They get the methods whose files follow
    float32 most closely in onnxruntime's own kernels. One kernel choice is enough to find these methods: methods differ
    only in the ranges of activations, which are the same for every kernel choice.
    """
    _drop_dominated(trials)
    closest: tuple[str, ...] | None = None
    # Choices with all methods come first, because their builds show which methods are the closest.
    for kernel in sorted(trials.alive(), key=lambda t: _gets_few_methods(trials, t)):
        if any(is_same_file(kernel, rival) and is_outrun(kernel, rival, trials.pace.twin) for rival in trials.alive()):
            continue  # this candidate would be almost as accurate as the same file in the faster engine
        methods = method_candidates(kernel.candidate, profile)
        if len(methods) > trials.pace.methods and _gets_few_methods(trials, kernel):
            closest = _find_closest_methods(trials, kernel.candidate, methods) if closest is None else closest
            methods = tuple(c for c in methods if _method_key(c) in closest)
        build_all(trials, [c.replace(threads=kernel.candidate.threads) for c in methods])
    for group in group_by_structure(trials.alive()):
        best = max(group, key=lambda t: t.sqnr_db)
        for trial in group:
            if (lower := best.sqnr_db - trial.sqnr_db) > trials.pace.sqnr_db:
                why = f"as fast as {best.name}, and its outputs' SQNR is {lower:.0f} dB lower"
                trials.eliminate(trial.name, why)


def is_same_file(trial: Trial, twin: Trial) -> bool:
    """Return whether two trials run the same file, either in different engines or in one engine with different
    precisions.
    """
    a, b = (t.candidate.replace(name="", threads=0, engine=None) for t in (trial, twin))
    return trial.candidate.engine != twin.candidate.engine and a == b


def _gets_few_methods(trials: Trials, kernel: Trial) -> bool:
    """Return whether a kernel choice gets only the most promising methods: it runs in an engine, or is slower than a
    choice that does.
    """
    ahead = (t for t in trials.alive() if t.candidate.engine is not None and t.candidate.quantized)
    return kernel.candidate.engine is not None or any(is_outrun(kernel, rival, trials.pace.behind) for rival in ahead)


def _method_key(candidate: Candidate) -> str:
    return f"{candidate.scheme.method} {sorted(candidate.scheme.method_options.items())}"


def _find_closest_methods(trials: Trials, kernel: Candidate, variants: Sequence[Candidate]) -> tuple[str, ...]:
    """Return the methods of `variants` whose files follow float32 most closely in onnxruntime's own kernels. If two
    methods give identical files, only one is returned.

    The files come from a kernel choice that was already built for onnxruntime's own kernels with all of these methods.
    If there is no such choice, `kernel` is built with the methods until the deadline.
    """
    method_keys = {_method_key(c) for c in variants}
    built: dict[str, dict[str, Screening]] = {}
    for trial in trials:
        if trial.candidate.engine is None and trial.screening is not None:
            built.setdefault(trial.structure, {})[_method_key(trial.candidate)] = trial.screening
    screenings = next((methods for methods in built.values() if method_keys <= methods.keys()), {})
    refused = []
    for candidate in () if screenings else (kernel, *variants):
        if trials.deadline.passed():
            break
        screening = _screen(trials, in_own_kernels(candidate))
        if isinstance(screening, Screening):
            screenings[_method_key(candidate)] = screening
        else:  # the engine may accept files that these kernels refuse
            refused.append(_method_key(candidate))
    distinct: dict[str, str] = {}
    for name in sorted(screenings, key=lambda name: (name in method_keys, -screenings[name].sqnr_db)):
        distinct.setdefault(screenings[name].content, name)
    ranked = [name for name in (*refused, *distinct.values()) if name in method_keys]
    return tuple(ranked[: trials.pace.methods])


def _drop_dominated(trials: Trials) -> None:
    """Drop a kernel choice if another one is at least as cheap and has outputs that are far closer to float32's. If two
    run about as fast in one engine, drop the one whose outputs are further from float32's. If the cost is a speed that
    cannot be claimed, keep both.
    """
    for trial in trials.alive():
        for rival in trials.alive():
            margin_db = (
                trials.pace.alike_db if trials.by_time and _is_in_same_engine(trial, rival) else trials.pace.sqnr_db
            )
            comparable = not trials.by_time or not describe_unclaimed(trial, rival)
            lower = rival.sqnr_db - trial.sqnr_db
            if comparable and lower > margin_db and not trials.is_cheaper(trial, rival):
                why = f"no better than {rival.name} in {trials.objective}"
                trials.eliminate(trial.name, f"{why}, and its outputs' SQNR is {lower:.0f} dB lower")
                break


def _is_in_same_engine(trial: Trial, rival: Trial) -> bool:
    """Return whether the same plug-in runs both trials, and both are quantized."""
    a, b = trial.candidate, rival.candidate
    return a.engine is not None and a.engine == b.engine and a.quantized and b.quantized
