"""Find the recoveries by name, and run all stages of a build with some of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edgeq.backends.base import Artifact, backend_named
from edgeq.calibration.hazards import with_hazards
from edgeq.calibration.ranges import scheme_ranges
from edgeq.calibration.rescaled import derive_statistics
from edgeq.data.samples import Samples
from edgeq.errors import UsageError
from edgeq.hardware.target import Target
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.agreement import Agreement, worst_db
from edgeq.model.load import read_unchecked, save_model
from edgeq.prove.job import Built, Job, build, build_derived, computed_as_there, job_ranges, with_extrema
from edgeq.prove.proof import FLOAT, simulated_count
from edgeq.run.session import Engines, SessionSettings
from edgeq.scheme import Scheme
from edgeq.tuning.recover.base import RecoveryState, Stage
from edgeq.tuning.recover.methods import recoveries
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import plain
from edgeq.util.registry import RECOVERIES

# Number of models that recoveries made which stay in memory: those of the longest chain of model recoveries.
_RECENT_MODELS = 3


class Recoverer:
    """Build artifacts of one job with recoveries, and keep the parts that several builds share.

    The shared parts are the float models that recoveries made, with their statistics, and finished artifacts. The key
    of an artifact is made from everything that decides its content, not from the names of its recoveries. A recovery
    may find that it has nothing to do, so different recoveries may give the same artifact.

    Args:
        workdir: an existing folder for float models that recoveries make, and for what they share. It must exist as
            long as the recoverer is in use.
    """

    def __init__(self, job: Job, target: Target, workdir: Path) -> None:
        self._job = job
        self._target = target
        self._workdir = workdir
        self._models: dict[object, RecoveryState] = {}
        self._finished: dict[str, RecoveryState] = {}

    def build(self, scheme: Scheme, names: Sequence[str], destination: Path, *, progress: Progress = SILENT) -> Built:
        """Build the artifact for `scheme` at `destination`, with the recoveries `names` applied.

        Model recoveries come first. If they change the model, its statistics follow from those before. Then the ranges
        are derived, the model is built, and the remaining recoveries edit the quantized file.

        Raises:
            UsageError: a recovery is unknown or does not support the scheme or the backend, or there are no calibration
                samples.
            EdgeqError: a stage of the build fails.
        """
        final = self.state(scheme, names, destination, progress=progress)
        assert final.artifact is not None
        if final.artifact.model != destination:
            save_model(read_unchecked(final.artifact.model), destination)
        notes = (*final.artifact.notes, *final.notes)
        artifact = replace(final.artifact, model=destination, notes=notes)
        return Built(self._target, computed_as_there(artifact, self._target, self._job.host), final.ranges)

    def state(
        self, scheme: Scheme, names: Sequence[str], destination: Path, *, progress: Progress = SILENT
    ) -> RecoveryState:
        """Return the state at the end of all stages. Its artifact may be in the work folder, not at `destination`.

        Raises:
            UsageError: for the same reasons as in `build`.
        """
        state = self.ranged(scheme, names, progress=progress)
        # Recoveries of earlier stages are not in the key: what they did is in the state already.
        key = _content_key(state, [name for name, r in recoveries().items() if name in names and r.stage == "artifact"])
        finished = self._finished.get(key)
        # Most of the time of a search goes into these builds, so one that fits is used again.
        if finished is None or finished.artifact is None or not _can_serve(finished.artifact, destination):
            recovered_job = replace(self._job, prepared=state.prepared, statistics=state.statistics)
            derived = with_extrema(recovered_job, self._target, state.ranges)
            artifact = build_derived(recovered_job, self._target, state.scheme, derived, destination).artifact
            samples = self._check(scheme, names)
            start = state.replace(artifact=artifact, notes=())
            finished = self._apply("artifact", names, start, samples, progress)
            if finished.artifact is not None and finished.artifact.model != artifact.model:
                finished = finished.replace(artifact=backend_named(self._target.backend).edited(finished.artifact))
            # The file is enough to use the artifact again. Its float model and statistics would fill the memory.
            self._finished[key] = finished.replace(prepared=self._job.prepared, statistics=None)
        # Recoveries of artifacts change neither the float model nor its statistics.
        finished = finished.replace(prepared=state.prepared, statistics=state.statistics)
        return finished.replace(notes=(*state.notes, *finished.notes))

    def ranged(self, scheme: Scheme, names: Sequence[str], *, progress: Progress = SILENT) -> RecoveryState:
        """Return the state before the build, with its model and its ranges. The errors are the same as in `state`."""
        samples = self._check(scheme, names)
        if scheme.mode != "static":
            return RecoveryState(self._job.prepared, None, {}, scheme)
        state = self._with_model(scheme, names, samples, progress)
        assert state.statistics is not None
        # The job's own ranges are valid only for the tensors of its own model. Ranges that a model recovery has fixed
        # do not change.
        is_unchanged = state.prepared.digest == self._job.prepared.digest
        derived = job_ranges(self._job, scheme) if is_unchanged else scheme_ranges(state.statistics, scheme)
        ranges = {**derived, **state.ranges}
        state = state.replace(scheme=scheme, ranges=ranges)
        return self._apply("ranges", names, state, samples, progress)

    def _check(self, scheme: Scheme, names: Sequence[str]) -> Samples:
        for name in names:
            RECOVERIES.check(name)
            every = recoveries()
            modes, stage = every[name].modes, every[name].stage
            if scheme.mode not in modes:
                others = [other for other, r in every.items() if r.stage == stage and scheme.mode in r.modes]
                raise UsageError(
                    f"{name} needs a scheme that is {' or '.join(modes)}, not {scheme.mode}",
                    f"Use {' or '.join(others)}" if others else "Choose one, or leave the recovery out",
                )
        refuse_ineffective(self._target, names)
        if self._job.calibration is None:
            raise UsageError("recoveries need calibration samples", "Give them with ⟨data⟩")
        return self._job.calibration

    def _with_model(self, scheme: Scheme, names: Sequence[str], samples: Samples, progress: Progress) -> RecoveryState:
        """Return the state after the "model" stage, with statistics of its model. The state is made only once for each
        set of recoveries.

        Layers that a scheme keeps in float make a difference only if a recovery would change them. So in a search for
        such layers, dozens of schemes use the same state.
        """
        assert self._job.statistics is not None
        start = RecoveryState(self._job.prepared, self._job.statistics, {}, scheme)
        named = {name: recovery for name, recovery in recoveries().items() if name in names}
        model_names = tuple(name for name, r in named.items() if r.stage == "model")
        if not model_names:
            return start
        state = self._apply_to_model(start.replace(scheme=scheme.replace(exclude=())), model_names, samples, progress)
        # Most exclusions do not meet a changed layer, so build without any first, and again only if one does.
        if touched := tuple(sorted(state.changed.intersection(scheme.exclude))):
            state = self._apply_to_model(
                start.replace(scheme=scheme.replace(exclude=touched)), model_names, samples, progress
            )
        return state

    def _apply_to_model(
        self, start: RecoveryState, names: Sequence[str], samples: Samples, progress: Progress
    ) -> RecoveryState:
        # Fields of the scheme that affect model recoveries.
        fields = (
            "activation_type",
            "activation_symmetric",
            "weight_type",
            "per_channel",
            "scale",
            "reduce_range",
            "exclude",
        )
        key = tuple(getattr(start.scheme, name) for name in fields)
        # Each state holds a whole model, and a search is done with one scheme before it turns to the next.
        for oldest in list(self._models)[:-_RECENT_MODELS]:
            del self._models[oldest]
        state = start
        # Each prefix is kept, because a search adds and removes recoveries one by one at the end.
        for count, name in enumerate(names, 1):
            prefix = (names[:count], key)
            if prefix not in self._models:
                self._models[prefix] = self._rewrite(name, state, samples, progress)
            state = self._models[prefix]
        return state

    def _rewrite(self, name: str, state: RecoveryState, samples: Samples, progress: Progress) -> RecoveryState:
        """Return the state after the model recovery `name`, with statistics and hazards of its model."""
        after = self._apply("model", (name,), state.replace(rescaled=None), samples, progress)
        if after.prepared.digest == state.prepared.digest:
            return after
        assert state.statistics is not None
        statistics = derive_statistics(
            state.statistics, state.prepared, after.prepared, after.rescaled, samples, progress=progress
        )
        prepared = with_hazards(after.prepared, statistics)
        # The values of the channels take memory, and nothing needs them any more.
        return after.replace(prepared=prepared, statistics=statistics, rescaled=None)

    def _apply(
        self, stage: Stage, names: Sequence[str], state: RecoveryState, samples: Samples, progress: Progress
    ) -> RecoveryState:
        for recovery in recoveries().values():
            if recovery.stage == stage and recovery.name in names:
                state = recovery.apply(state, samples, self.place(recovery.name), progress)
        return state

    def place(self, name: str = "build") -> Path:
        """Return a new folder inside the work folder."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._workdir))


def find_ineffective(target: Target) -> frozenset[str]:
    """Return the names of the recoveries that have no effect for `target`. These recoveries edit a quantized file that
    the target's backend does not use for its result.
    """
    if backend_named(target.backend).recoverable:
        return frozenset()
    return frozenset(name for name, recovery in recoveries().items() if recovery.stage == "artifact")


def refuse_ineffective(target: Target, names: Sequence[str]) -> None:
    """Refuse recoveries that have no effect on what is built for `target`.

    Raises:
        UsageError: a recovery has no effect. The message names it, the backend, and the recoveries that do have an
            effect.
    """
    vain = find_ineffective(target)
    culprit = next((name for name in names if name in vain), None)
    if culprit is not None:
        choices = ", ".join(name for name in recoveries() if name not in vain)
        raise UsageError(
            f"{culprit} has no effect on what the {target.backend} backend builds for {target.name}",
            f"Leave it out, or choose among {choices}",
        )


def _can_serve(artifact: Artifact, destination: Path) -> bool:
    """Return whether an artifact that was built before can be used for `destination`. A model alone can be copied. If
    other files belong to the artifact, it must already be at `destination`, because their names contain the model's
    name.
    """
    further = artifact.files or artifact.tables or artifact.alternatives or artifact.simulation
    return artifact.model.exists() and (not further or artifact.model == destination)


def _content_key(state: RecoveryState, names: Sequence[str]) -> str:
    """Return a text that identifies an artifact: the float model, scheme and ranges of `state`, and the recoveries
    `names`, which edit the file.
    """
    ranges = sorted((name, r.low, r.high) for name, r in state.ranges.items())
    return json.dumps([state.prepared.digest, plain(state.scheme), ranges, names], sort_keys=True)


_PLAIN, _RECOVERED = "plain", "recovered"


def keep_better(
    job: Job, recovered: Built, scheme: Scheme, names: Sequence[str], workdir: Path, progress: Progress
) -> Built:
    """Return `recovered`, or a plain build without the recoveries `names` if the plain build has a higher SQNR in the
    proof. The proof's SQNR is that of the worst output on the validation samples.

    Args:
        scheme: the scheme of the plain build.
        workdir: an existing folder for the plain build. It must exist as long as the result is in use.

    Raises:
        EdgeqError: the plain build fails, or a model refuses a sample.
    """
    destination = recovered.artifact.model
    with progress.stage("Comparing with the build without recoveries"):
        plain_build = build(job, recovered.target, scheme, workdir / destination.name)
        sqnr_db = {
            name: worst_db(agreement) for name, agreement in _measure_agreements(job, plain_build, recovered).items()
        }
    if sqnr_db[_RECOVERED] >= sqnr_db[_PLAIN]:
        return recovered
    # Build again at the destination, because files beside a model contain its name and cannot simply be moved.
    without = build(job, recovered.target, scheme, destination)
    plain_db, recovered_db = sqnr_db[_PLAIN], sqnr_db[_RECOVERED]
    note = (
        f"{', '.join(names)}: left out, because the result is worse: {recovered_db:.1f} dB SQNR against float32, "
        f"{plain_db:.1f} dB without"
    )
    return replace(without, artifact=replace(without.artifact, notes=(*without.artifact.notes, note)))


def _measure_agreements(job: Job, plain_build: Built, recovered: Built) -> dict[str, Agreement]:
    """Return how closely each of the two builds follows the float model. Each build runs with the settings of
    its proof.
    """
    # A simulator runs few samples, so both builds are compared on the same few.
    count = simulated_count(job.prepared, recovered.artifact)
    with Engines() as engines:
        sessions = {FLOAT: engines.open(job.prepared.path, SessionSettings())}
        for name, built in {_PLAIN: plain_build, _RECOVERED: recovered}.items():
            sessions[name] = engines.open(built.artifact.proof_model, built.artifact.proof_settings())
        float_outputs = {FLOAT: job.float_outputs} if job.float_outputs else {}
        evaluation = evaluate_sessions(
            sessions, job.validation, reference=FLOAT, count=count, known_outputs=float_outputs, basis=job.basis
        )
        return dict(evaluation.agreement)
