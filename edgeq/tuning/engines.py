"""Choose the engines in a search: which engines are timed, what runs in each, and which are dropped.

A candidate's file is built once and runs in every engine that supports its types. The float model runs in each engine,
in each precision that is fast on this machine. To keep the search short, edgeq first times only one int8 candidate and
the float model in each engine. If the candidate is slower in an engine than in another one, or slower than float32,
that engine is not timed further.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgeq_device.engines.catalog import find_library, read_installed_version
from edgeq_device.measure.claim import SLOWER

from edgeq.backends.base import Artifact, backend_named
from edgeq.errors import EngineError, UsageError
from edgeq.hardware.detect import Machine
from edgeq.hardware.engines import Installed, detect_engines
from edgeq.hardware.target import THIS_MACHINE, Target
from edgeq.prove.engine_check import check_engine
from edgeq.prove.job import Built, DerivedValues, Job, build_derived, derive
from edgeq.run.engines import DEFAULT, Engine, EngineChoice, find_only_engine, load_engines
from edgeq.run.session import onnxruntime
from edgeq.scheme import Scheme
from edgeq.tuning.build import same_file
from edgeq.tuning.goal import EQUAL, SQNR_BEHIND_DB
from edgeq.tuning.recover.run import Recoverer
from edgeq.tuning.space import Candidate, build_sequence, in_engine, with_scheme
from edgeq.tuning.trials import Trial, Trials, behind, outrun, unmeasured
from edgeq.util.display import SILENT, Progress
from edgeq.util.registry import device_errors

# Fields of `Scheme` for weights that never saturate. The field that adds the least noise is first.
_SAFE_WEIGHTS = ("fit_pairs", "reduce_range")


@dataclass(frozen=True)
class Field:
    """Hold the engines of a search.

    Attributes:
        plugins: plug-in engines, with one entry for each precision that is timed.
        own: whether onnxruntime's own kernels are timed as well.
        versions: versions of the packages that contain the plug-ins, by engine name.
        saturating: by engine name, the pairs of types whose products a plug-in adds up in 16 bits on this machine.
    """

    plugins: tuple[EngineChoice, ...] = ()
    own: bool = True
    versions: dict[str, str] = field(default_factory=dict)
    saturating: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def fitting(self, candidate: Candidate, engine: Engine) -> tuple[Candidate, ...]:
        """Return the forms of `candidate` that run correctly in `engine`.

        Normally the only form is the candidate itself. If the engine's kernels saturate, return one form for each kind
        of weights that cannot saturate. If the candidate does not suit the engine, return nothing.
        """
        scheme = candidate.scheme
        if not suits(candidate, engine):
            return ()
        if scheme.pair not in self.saturating.get(engine.name, ()):
            return (candidate,)
        full = scheme.replace(reduce_range=False, fit_pairs=False)
        safe = [full.replace(**{name: True}) for name in _SAFE_WEIGHTS if name in engine.int8.remedy_cost]
        return tuple(with_scheme(candidate, made) for made in safe)

    def without(self, names: Iterable[str]) -> Field:
        """Return the field without the engines in `names`."""
        left = tuple(choice for choice in self.plugins if choice.engine.name not in set(names))
        return replace(self, plugins=left)

    def also_on(
        self, installed: Mapping[str, Installed], asked: Sequence[EngineChoice], progress: Progress = SILENT
    ) -> Field:
        """Return the field with only the engines that another machine has in the same version. The other machine times
        files that are built and assessed on this one.

        Raises:
            EngineError: an engine in `asked` is missing there or has another version.
        """
        other = {n for n, version in self.versions.items() if installed.get(n, Installed()) != Installed(version)}
        for name in sorted(other):
            found = installed.get(name, Installed())
            problem = f"{name} {self.versions[name]} is here, {found.problem or found.version or 'none'} on the board"
            if any(choice.engine.name == name for choice in asked):
                raise EngineError(problem, "Install the same version on both, or leave --engine out")
            progress.note(f"{name} is left out: {problem}")
        return self.without(other)


def find_field(
    target: Target,
    machine: Machine,
    asked: Sequence[EngineChoice] = (),
    *,
    timed: bool = True,
    progress: Progress = SILENT,
) -> Field:
    """Return the engines to time for `target`: the installed engines that give correct results on this machine. If
    `asked` names engines, return only those. edgeq loads and checks each engine in a separate process.

    Raises:
        UsageError: `asked` names only plug-ins, none of which can run what is built for the target.
        RuntimeUnavailableError: a named engine is not installed.
        EngineError: a named engine gives wrong results.
    """
    known, wanted = load_engines(), {choice.engine.name for choice in asked}
    own = not asked or DEFAULT in wanted
    if not timed or backend_named(target.backend).targeted or find_only_engine(target.backend):
        if not own:
            raise UsageError(f"{asked[0].name} does not run what is built for {target.name}", "Leave --engine out")
        return Field()
    for name in sorted(wanted):
        if known[name].module:
            with device_errors():
                find_library(known[name], str(onnxruntime().__version__))
    features = machine.features if target.name == THIS_MACHINE else target.profile.requires
    found = []
    for state in detect_engines(machine, known):
        engine = known[state.name]
        if not engine.module or not state.version or (asked and state.name not in wanted):
            continue
        if not asked and find_only_engine(engine.int8.backend) == engine:  # this engine has its own targets
            continue
        fast = engine.fast_precisions(features)
        choices = [c for c in asked if c.engine.name == engine.name] or [EngineChoice(engine, name) for name in fast]
        problem = state.problem or _unfit(engine, tuple(c.precision for c in choices))
        if problem and asked:
            raise EngineError(f"{engine.name}: {problem}", "`edgeq doctor` checks the engines")
        if problem:
            progress.note(f"{engine.name} is left out: {problem}")
        else:
            found += choices
    saturating = {
        c.engine.name: tuple(
            p for p in c.engine.int8.pairs if c.engine.has_saturating_kernels(p, target.architecture, features)
        )
        for c in found
    }
    versions = {c.engine.name: read_installed_version(c.engine) for c in found}
    return Field(tuple(found), own, versions, {name: pairs for name, pairs in saturating.items() if pairs})


def _unfit(engine: Engine, precisions: tuple[str, ...]) -> str:
    if Artifact.device.upper() not in engine.devices:
        return f"it runs on {', '.join(engine.devices)}, but models are built for the CPU here"
    right, what = check_engine(engine, precisions)
    return "" if right else what


def suits(candidate: Candidate, engine: Engine) -> bool:
    """Return whether `engine` has integer kernels for a candidate. A candidate with its own builder never suits an
    engine.
    """
    scheme = candidate.scheme
    plain = scheme.mode == "static" and scheme.format == "QDQ" and not candidate.builder and not scheme.session_options
    return plain and scheme.pair in engine.int8.pairs


def with_entrants(candidates: Sequence[Candidate], field: Field, *, unquantized: bool = True) -> tuple[Candidate, ...]:
    """Return `candidates` with new candidates for each plug-in engine: the first candidate that suits the engine, and
    the float model. The new candidates are inserted after the first candidate that suits any engine.

    Args:
        unquantized: whether to add the float model.
    """
    if not field.plugins:
        return tuple(candidates)
    first = {c.engine.name: next((x for x in candidates if suits(x, c.engine)), None) for c in field.plugins}
    entrants = [
        in_engine(fitting, c)
        for c in field.plugins
        if (made := first[c.engine.name]) is not None
        for fitting in field.fitting(made, c.engine)
    ]
    if unquantized:
        entrants += [in_engine(Candidate("unquantized", Scheme(mode="float")), c) for c in field.plugins]
    position = 1 + min((candidates.index(made) for made in first.values() if made is not None), default=-1)
    return (*candidates[:position], *entrants, *candidates[position:])


def drop_slower_twins(trials: Trials, *, own: bool = True) -> None:
    """Drop a trial if its file runs faster in another engine, or in the same engine in another precision, unless its
    outputs are much closer to float32's. Also drop a trial in a lower precision if its file runs no faster than in the
    higher precision. If one of the two speeds cannot be claimed, keep both trials.

    Args:
        own: whether trials in onnxruntime's own kernels can be dropped as well.
    """
    candidates = [t for t in trials.alive() if own or t.candidate.engine is not None]
    for trial in sorted(candidates, key=lambda t: t.latency, reverse=True):
        for other in trials.alive():
            untimed = trial.timing is None or other.timing is None or unmeasured(trial, other)
            if untimed or not same_file(trial, other) or trial.sqnr_db >= other.sqnr_db + SQNR_BEHIND_DB:
                continue
            lower = _is_lower(trial.candidate, other.candidate)
            if lower:
                gone = not _pays(trials, trial, other)
            elif _is_lower(other.candidate, trial.candidate):
                gone = _pays(trials, other, trial)
            else:
                gone = outrun(trial, other, trials.pace.behind)
            if gone:
                why = behind(trial, other)
                trials.eliminate(trial.name, f"{why}, too little for its lower precision" if lower else why)
                break


def _pays(trials: Trials, lower: Trial, higher: Trial) -> bool:
    """Return whether the lower of two precisions is certainly faster for this file. If the float model was timed in
    both precisions, it must be certainly faster in the lower one as well.

    If a file is all in int8, it can be faster in one precision only by chance. But the precision chosen here is also
    used for layers that recoveries later put into float.
    """
    floats = [t for t in trials if not t.candidate.quantized and t.timing is not None]
    alike = [t for one in (lower, higher) for t in floats if t.candidate.engine == one.candidate.engine]
    return _surely_faster(lower, higher) and (len(alike) < 2 or _surely_faster(*alike))


def _is_lower(candidate: Candidate, twin: Candidate) -> bool:
    """Return whether both candidates are for the same engine, and `candidate` has the lower precision."""
    mine, other = candidate.engine, twin.engine
    if mine is None or other is None or mine.engine.name != other.engine.name:
        return False
    order = list(mine.engine.precisions)
    return order.index(mine.precision) > order.index(other.precision)


def _surely_faster(one: Trial, other: Trial) -> bool:
    """Return whether `one` is certainly faster than `other`. The lower end of the speed interval of `one` must be above
    the median of `other`, and the medians must differ by more than the share that counts as equal.
    """
    mine, its = (t.timing.speedup.interval if t.timing and t.timing.speedup else None for t in (one, other))
    return mine is not None and its is not None and mine[1] > its[0] and one.latency * (1 + EQUAL) < other.latency


def more_in_engines(trials: Trials, sources: Sequence[Candidate], field: Field) -> list[Candidate]:
    """Return `sources` as candidates for plug-in engines, in each engine's fastest precision. An engine gets them if
    its int8 candidate is still in the run and not slower than float32. Candidates that exist already are left out.
    """
    best: dict[str, Trial] = {}
    for trial in sorted(trials.alive(), key=lambda t: t.latency):
        known = trial.timing is not None and trial.verdict != SLOWER
        if known and trial.candidate.engine and trial.candidate.quantized:
            best.setdefault(trial.candidate.engine.engine.name, trial)
    made: dict[str, Candidate] = {}
    for trial in best.values():
        choice = trial.candidate.engine
        assert choice is not None
        for source in sources:
            for twin in (in_engine(c, choice) for c in field.fitting(source, choice.engine)):
                made[twin.name] = twin.replace(threads=trial.candidate.threads)
    return [candidate for name, candidate in made.items() if name not in trials]


class CandidateBuilder:
    """Build the candidates of one job, and keep the parts that several of them share.

    Args:
        workdir: an existing folder. It must exist as long as the builder is in use.

    Attributes:
        recoverer: builds candidates with accuracy recoveries.
    """

    def __init__(self, job: Job, target: Target, workdir: Path, progress: Progress = SILENT) -> None:
        self._job = job
        self._target = target
        self._progress = progress
        self._derived: dict[object, DerivedValues] = {}
        self.recoverer = Recoverer(job, target, workdir)

    def build(self, candidate: Candidate, destination: Path) -> Built:
        """Build the candidate's model at `destination`, with its recoveries. Use the candidate's own builder if it has
        one, else the target's backend.

        Raises:
            EdgeqError: the candidate cannot be built.
        """
        job, target, scheme = self._job, self._target, candidate.scheme
        if not candidate.quantized:
            artifact = Artifact(job.prepared.path, scheme, load_engines()[DEFAULT].provider)
            engine = find_only_engine(target.backend)
            return Built(target, artifact.in_engine(EngineChoice(engine)) if engine else artifact)
        if candidate.builder:
            return build_sequence(job, target, candidate, destination, self._progress)
        if candidate.recoveries:
            return self.recoverer.build(scheme, candidate.recoveries, destination, progress=self._progress)
        options = tuple(sorted(scheme.method_options.items()))
        key = (scheme.mode, scheme.method, options, scheme.activation_type, scheme.activation_symmetric)
        if key not in self._derived:
            self._derived[key] = derive(job, target, scheme)
        return build_derived(job, target, scheme, self._derived[key], destination)
