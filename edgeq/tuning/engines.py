"""Choose the engines of a search: which engines are timed, and what runs in each.

A candidate's file is built once and runs in every engine that supports its types. The float model runs in each engine,
in each precision that is fast on this machine. To keep the search short, edgeq first times only one int8 candidate and
the float model in each engine. If the candidate is slower in an engine than in another one, or slower than float32,
that engine is not timed further.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgeq_device.engines.catalog import find_library, read_installed_version
from edgeq_device.measure.claim import SLOWER

from edgeq.backends.base import Artifact, backend_named
from edgeq.errors import EngineError, UsageError
from edgeq.hardware.detect import Machine
from edgeq.hardware.engines import Installed, detect_engines
from edgeq.hardware.target import THIS_MACHINE, Target
from edgeq.prove.engine_check import check_engine
from edgeq.run.engines import DEFAULT, Engine, EngineChoice, find_only_engine, load_engines
from edgeq.run.session import onnxruntime
from edgeq.scheme import Scheme
from edgeq.tuning.space import Candidate, in_engine, with_scheme
from edgeq.tuning.trials import Trial, Trials
from edgeq.util.device_errors import device_errors
from edgeq.util.display import SILENT, Progress

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

    def fitting_forms(self, candidate: Candidate, engine: Engine) -> tuple[Candidate, ...]:
        """Return the forms of `candidate` that run correctly in `engine`.

        Normally the only form is the candidate itself. If the engine's kernels saturate, return one form for each kind
        of weights that cannot saturate. If the candidate does not suit the engine, return nothing.
        """
        scheme = candidate.scheme
        if not is_suited(candidate, engine):
            return ()
        if scheme.pair not in self.saturating.get(engine.name, ()):
            return (candidate,)
        # Start from full weights: with both remedies at once, the weights would lose precision twice.
        full = scheme.replace(reduce_range=False, fit_pairs=False)
        safe = [full.replace(**{name: True}) for name in _SAFE_WEIGHTS if name in engine.int8.remedy_cost]
        return tuple(with_scheme(candidate, safe_scheme) for safe_scheme in safe)

    def without(self, names: Iterable[str]) -> Field:
        """Return the field without the engines in `names`."""
        plugins = tuple(choice for choice in self.plugins if choice.engine.name not in set(names))
        return replace(self, plugins=plugins)

    def limit_to(
        self, installed: Mapping[str, Installed], requests: Sequence[EngineChoice], progress: Progress = SILENT
    ) -> Field:
        """Return the field with only the engines that another machine has in the same version. The other machine times
        files that are built and assessed on this one.

        Raises:
            EngineError: an engine in `requests` is missing there or has another version.
        """
        mismatches = {n for n, version in self.versions.items() if installed.get(n, Installed()) != Installed(version)}
        for name in sorted(mismatches):
            counterpart = installed.get(name, Installed())
            version = counterpart.problem or counterpart.version or "none"
            problem = f"{name} {self.versions[name]} is here, {version} on the board"
            if any(choice.engine.name == name for choice in requests):
                raise EngineError(problem, "Install the same version on both, or leave ⟨engine⟩ out")
            progress.note(f"{name} is left out: {problem}")
        return self.without(mismatches)


def find_field(
    target: Target,
    machine: Machine,
    requests: Sequence[EngineChoice] = (),
    *,
    timed: bool = True,
    progress: Progress = SILENT,
) -> Field:
    """Return the engines to time for `target`: the installed engines that give correct results on this machine. If
    `requests` names engines, return only those. edgeq loads and checks each engine in a separate process.

    Raises:
        UsageError: `requests` names only plug-ins, none of which can run what is built for the target.
        RuntimeUnavailableError: a named engine is not installed.
        EngineError: a named engine gives wrong results.
    """
    engines, names = load_engines(), {choice.engine.name for choice in requests}
    with_own_kernels = not requests or DEFAULT in names
    # Without timing, or with an engine of the target's own, there is nothing to compare.
    if not timed or backend_named(target.backend).targeted or find_only_engine(target.backend):
        if not with_own_kernels:
            raise UsageError(f"{requests[0].name} does not run what is built for {target.name}", "Leave ⟨engine⟩ out")
        return Field()
    # Find the libraries of named engines first: an engine that is asked for but not installed is an error, not a note.
    for name in sorted(names):
        if engines[name].module:
            with device_errors():
                find_library(engines[name], str(onnxruntime().__version__))
    features = machine.features if target.name == THIS_MACHINE else target.profile.requires
    plugins = []
    for state in detect_engines(machine, engines):
        engine = engines[state.name]
        if not engine.module or not state.version or (requests and state.name not in names):
            continue
        if not requests and find_only_engine(engine.int8.backend) == engine:  # this engine has its own targets
            continue
        fast = engine.fast_precisions(features)
        choices = [c for c in requests if c.engine.name == engine.name] or [EngineChoice(engine, name) for name in fast]
        problem = state.problem or _describe_problem(engine, tuple(c.precision for c in choices))
        # Whoever names an engine wants to know that it fails. Otherwise it is only left out, so that tuning works
        # anywhere.
        if problem and requests:
            raise EngineError(f"{engine.name}: {problem}", "`edgeq doctor` checks the engines")
        if problem:
            progress.note(f"{engine.name} is left out: {problem}")
        else:
            plugins += choices
    saturating = {
        c.engine.name: tuple(
            p for p in c.engine.int8.pairs if c.engine.has_saturating_kernels(p, target.architecture, features)
        )
        for c in plugins
    }
    versions = {c.engine.name: read_installed_version(c.engine) for c in plugins}
    return Field(
        tuple(plugins), with_own_kernels, versions, {name: pairs for name, pairs in saturating.items() if pairs}
    )


def _describe_problem(engine: Engine, precisions: tuple[str, ...]) -> str:
    if Artifact.device.upper() not in engine.devices:
        return f"it runs on {', '.join(engine.devices)}, but models are built for the CPU here"
    is_correct, problem = check_engine(engine, precisions)
    return "" if is_correct else problem


def is_suited(candidate: Candidate, engine: Engine) -> bool:
    """Return whether `engine` has integer kernels for a candidate. A candidate with its own builder never suits an
    engine.
    """
    scheme = candidate.scheme
    static_qdq = (
        scheme.mode == "static" and scheme.format == "QDQ" and not candidate.builder and not scheme.session_options
    )
    return static_qdq and scheme.pair in engine.int8.pairs


def add_entrants(candidates: Sequence[Candidate], field: Field, *, unquantized: bool = True) -> tuple[Candidate, ...]:
    """Return `candidates` with new candidates for each plug-in engine: the first candidate that suits the engine, and
    the float model. The new candidates are inserted after the first candidate that suits any engine.

    Args:
        unquantized: whether to add the float model.
    """
    if not field.plugins:
        return tuple(candidates)
    sources = {c.engine.name: next((x for x in candidates if is_suited(x, c.engine)), None) for c in field.plugins}
    entrants = [
        in_engine(fitting, c)
        for c in field.plugins
        if (source := sources[c.engine.name]) is not None
        for fitting in field.fitting_forms(source, c.engine)
    ]
    if unquantized:
        entrants += [in_engine(Candidate("unquantized", Scheme(mode="float")), c) for c in field.plugins]
    # A short budget should see an engine's candidate early, but after the profile's own choice.
    position = 1 + min((candidates.index(source) for source in sources.values() if source is not None), default=-1)
    return (*candidates[:position], *entrants, *candidates[position:])


def find_engine_candidates(trials: Trials, sources: Sequence[Candidate], field: Field) -> list[Candidate]:
    """Return `sources` as candidates for plug-in engines, in each engine's fastest precision. An engine gets them if
    its int8 candidate is still in the run and not slower than float32. Candidates that exist already are left out.
    """
    best: dict[str, Trial] = {}
    for trial in sorted(trials.alive(), key=lambda t: t.latency):
        competitive = trial.timing is not None and trial.verdict != SLOWER
        if competitive and trial.candidate.engine and trial.candidate.quantized:
            best.setdefault(trial.candidate.engine.engine.name, trial)
    twins: dict[str, Candidate] = {}
    for trial in best.values():
        choice = trial.candidate.engine
        assert choice is not None
        for source in sources:
            for twin in (in_engine(c, choice) for c in field.fitting_forms(source, choice.engine)):
                # The threads were chosen for the engine with its first candidate, and need no further race.
                twins[twin.name] = twin.replace(threads=trial.candidate.threads)
    return [candidate for name, candidate in twins.items() if name not in trials]
