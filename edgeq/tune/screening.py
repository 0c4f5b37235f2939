"""Candidates built and looked at: what does not load, computes nothing in int8, is there already or is far from
float32's outputs is dropped before anything is measured at length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from edgeq.backends.base import Artifact
from edgeq.errors import BoardError, EdgeqError
from edgeq.hardware.profile import Profile
from edgeq.measure.coverage import measure_coverage, sized_macs
from edgeq.model.load import content_digest, structure_digest
from edgeq.model.prepare import PreparedModel
from edgeq.report.tuning_record import Screening, Stage
from edgeq.tune.engines import outrun, same_file
from edgeq.tune.evaluator import Evaluator
from edgeq.tune.explain import Trial, relative_latency, unmeasured
from edgeq.tune.goal import Deadline
from edgeq.tune.journal import SampleStore
from edgeq.tune.sessions import Clock
from edgeq.tune.space import Candidate, in_own_kernels, method_candidates
from edgeq.tune.trials import BY_TIME, ROUGHLY, TIE, TrialTable, sqnr_of, structure_of

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
    a thorough search for all, and all of them.

    An engine may take seconds to compile each. So what runs in one, and what one leaves behind, gets only the methods
    whose files follow float32 most closely in onnxruntime's own kernels. Which these are is found with one kernel
    choice: methods differ in the ranges of activations, which are those of every other.
    """
    thorough = table.goal.thorough
    if not thorough:
        _drop_dominated(table)
    closest: tuple[str, ...] = ()
    for kernel in sorted(table.alive(), key=lambda t: _in_few(table, t)):
        if not thorough and _has_faster_twin(table, kernel):
            continue
        methods = method_candidates(kernel.candidate, profile)
        if not thorough and methods and _in_few(table, kernel):
            closest = closest or _closest(table, evaluator, deadline, kernel.candidate, methods)
            methods = tuple(c for c in methods if _method(c) in closest)
        build_all(table, evaluator, deadline, [c.replace(threads=kernel.candidate.threads) for c in methods])
    if not thorough:
        _drop_distant(table)


def _in_few(table: TrialTable, kernel: Trial) -> bool:
    """Whether a kernel choice gets the most promising methods alone: it runs in an engine, or is behind one."""
    ahead = (t for t in table.alive() if t.candidate.engine is not None and t.candidate.quantized)
    return kernel.candidate.engine is not None or any(outrun(kernel, other) for other in ahead)


def _method(candidate: Candidate) -> str:
    return f"{candidate.scheme.method} {sorted(candidate.scheme.method_options.items())}"


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


def _closest(
    table: TrialTable, evaluator: Evaluator, deadline: Deadline, kernel: Candidate, others: Sequence[Candidate]
) -> tuple[str, ...]:
    """The methods of `others` whose files follow float32 most closely in onnxruntime's own kernels, and are not those
    of another method: of the kernel choice that was built there with all of them, or else of `kernel`, as far as they
    are built until the deadline."""
    wanted = {_method(c) for c in others}
    built: dict[str, dict[str, Screening]] = {}
    for trial in table:
        if trial.candidate.engine is None and trial.screening is not None:
            built.setdefault(trial.screening.structure, {})[_method(trial.candidate)] = trial.screening
    found = next((methods for methods in built.values() if wanted <= methods.keys()), {})
    refused = []
    for candidate in () if found else (kernel, *others):
        if deadline.passed():
            break
        screening = _screened(evaluator, in_own_kernels(candidate))
        if isinstance(screening, Screening):
            found[_method(candidate)] = screening
        else:  # the engine may take what these kernels refuse
            refused.append(_method(candidate))
    distinct: dict[str, str] = {}
    for name in sorted(found, key=lambda name: (name in wanted, -found[name].sqnr_db)):
        distinct.setdefault(found[name].content, name)
    ranked = [name for name in (*refused, *distinct.values()) if name in wanted]
    return tuple(ranked[:_METHODS_IN_ENGINE])


def _drop_dominated(table: TrialTable) -> None:
    """Kernel choices that are no cheaper than another one whose outputs are far closer to float32's; of two in one
    engine that are about as fast, the one whose outputs are further. Where the cost is a speed that cannot be claimed,
    both stay; the float model in another engine is always closer."""
    for trial in table.alive():
        for other in table.alive():
            alike = _in_one_engine(trial, other) and table.objective in BY_TIME
            known = table.objective not in BY_TIME or not unmeasured(trial, other)
            least, tie = (0.0, ROUGHLY) if alike else (_SQNR_BEHIND_DB, TIE)
            behind = sqnr_of(other) - sqnr_of(trial)
            if known and not table.cheaper(trial, other, tie) and behind > least:
                why = (
                    f"no better than {other.name} in {table.objective}, and its outputs' SQNR is {behind:.0f} dB lower"
                )
                table.eliminate(trial.name, why)
                break


def _in_one_engine(one: Trial, other: Trial) -> bool:
    """Whether one plug-in runs both, in integers."""
    a, b = one.candidate, other.candidate
    return a.engine is not None and a.engine == b.engine and a.quantized and b.quantized


class Structures:
    """Finds each of them once.

    Args:
        prepared: the float model that artifacts are made of.
        samples: its first is what a structure is run on.
        clock: where its operators are fused, which depends on the machine.
    """

    def __init__(self, prepared: PreparedModel, samples: SampleStore, clock: Clock) -> None:
        self._prepared = prepared
        self._samples = samples
        self._clock = clock
        self._digests: dict[str, tuple[str, str]] = {}
        self._shares: dict[str, float] = {}

    def digests(self, artifact: Artifact) -> tuple[str, str]:
        """Of an artifact's structure and of its content, whatever engine it runs in."""
        key = f"{artifact.proof_model} {sorted(artifact.session_options.items())}"
        if key not in self._digests:
            file = artifact.proof_model, artifact.session_options
            self._digests[key] = structure_digest(*file), content_digest(*file)
        return self._digests[key]

    def int8_mac_share(self, artifact: Artifact) -> float:
        """The share of multiply-accumulates in int8 of an artifact in onnxruntime's own kernels."""
        structure, _ = self.digests(artifact)
        if structure not in self._shares:
            self._shares[structure] = self._measured_share(artifact)
        return self._shares[structure]

    def _measured_share(self, artifact: Artifact) -> float:
        if artifact.coverage is not None:
            return artifact.coverage.int8_mac_share or 0.0
        found = measure_coverage(
            artifact.model,
            artifact.settings(),
            self._feed,
            self._prepared.model,
            lambda name, op_type: "",
            macs=self._macs,
            opener=self._clock.open_profiled,
        )
        return found.int8_mac_share or 0.0

    @cached_property
    def _macs(self) -> dict[str, int]:
        return sized_macs(self._prepared.model, self._feed)

    @property
    def _feed(self) -> Mapping[str, Any]:
        return self._samples[0].inputs
