"""Evaluate candidates on this machine: the target's backend builds them, and ONNX Runtime runs them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.measure.claim import FEWEST_SESSIONS, RaceRules, SpeedRanking, make_claim
from edgeq_device.measure.latency import UNDISTURBED_ROUNDS, Bursts, WarmUp, compute_shared_edges, count_bins

from edgeq.backends.base import Artifact, backend_named
from edgeq.data.samples import Subset
from edgeq.errors import CheckFailedError
from edgeq.hardware.target import Target
from edgeq.measure.agreement import Agreement
from edgeq.measure.answer_task import FloatAnswers
from edgeq.measure.coverage import measure_coverage
from edgeq.measure.kernel_times import kernel_times
from edgeq.measure.node_runs import count_macs
from edgeq.measure.structure_timing import StructureTiming
from edgeq.measure.timed_model import count_sessions
from edgeq.model.digests import content_digest, structure_digest, with_engine
from edgeq.model.files import model_bytes
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.prove.builds import runtime_requirements
from edgeq.prove.job import Built, Job
from edgeq.prove.proof import simulated_count
from edgeq.run.session import Engines, SessionSettings, build_float_settings, open_session
from edgeq.tuning import float_layers
from edgeq.tuning.accuracy import AccuracyMeter
from edgeq.tuning.accuracy_estimate import LossKind
from edgeq.tuning.assessment_job import assess_on, build_assessment_job
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.candidate_builder import CandidateBuilder
from edgeq.tuning.clock import Clock, LocalClock, Model
from edgeq.tuning.evaluator import Race, Runner
from edgeq.tuning.journal import digest
from edgeq.tuning.judge import FEWEST_SAMPLES
from edgeq.tuning.measurements import Assessment, Screening
from edgeq.tuning.ranking import SCREENED, LayerRanker
from edgeq.tuning.recover.methods import recoveries, recovery_groups
from edgeq.tuning.recover.run import find_ineffective
from edgeq.tuning.sessions import STORED, SessionPool, model_to_judge, open_once
from edgeq.tuning.space import Candidate
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import plain

# A simulated candidate runs at most this multiple of the samples that a proof runs. That takes some minutes.
_SIMULATIONS = 4
_BATCH = 8
_MIN_SQNR_DB = -200.0
# Kernels that only round differently lose almost no decibels. Kernels that saturate lose several.
_LOSS_DB = 3.0
# With more runners than this, each model gets as few sessions as in a rough race, because the best of them are timed
# again.
_RUNNERS_IN_SESSIONS = 8
# Bursts are short, because the number of rounds decides how well a race distinguishes runners.
_BURSTS = Bursts(0.025, 0.006)
# `min_rounds` is at least two rounds for each session. `_ROUGH_RACE` has a low confidence: if a race only decides
# what to examine next, some of its comparisons may be wrong.
_FINAL_RACE: dict[str, float] = {"confidence": 0.95, "min_rounds": 12}
_ROUGH_RACE: dict[str, float] = {"confidence": 0.5, "min_rounds": 8}
# Minimum loss of time in integers for a layer to be considered, as a share of float32's time. Smaller losses are noise
# of the profiler.
_MIN_LOST_SHARE = 0.002


class LocalEvaluator:
    """Measure candidates on this machine: see `edgeq.tuning.evaluator.CandidateEvaluator`.

    Args:
        workdir: folder for models, samples and outputs. It must exist as long as the evaluator is in use.
        counts: whether speed is counted, because the target's kernels do not run here. If so, artifacts run in
            simulation, and losses are measured on the validation samples alone, as the proof reports them. The
            exception: if there are labels and recoveries can edit what ships, a loss is the larger of this figure and
            the loss to expect on other samples.
        repairs: whether a poor build is repaired. If so, a loss is the loss to expect on other samples or, without
            labels, noise. Layers are ranked by tensors alone. A file that the target's onnxruntime cannot run is not a
            candidate.
        profiled: whether this machine's profile prices layers in float although speed is counted.
        batched: whether to time batches of 8, for throughput, if the model's first axis is free.
        memory: bytes of samples and float32 outputs to keep in memory.
        engines: opens sessions of plug-ins; needed if candidates name a plug-in.
        clock: measures latencies; by default, on this machine.

    Attributes:
        builder: builds candidates.
    """

    def __init__(
        self,
        job: Job,
        target: Target,
        workdir: Path,
        *,
        counts: bool = False,
        repairs: bool = False,
        profiled: bool = False,
        batched: bool = False,
        memory: int = STORED,
        engines: Engines | None = None,
        clock: Clock | None = None,
        progress: Progress = SILENT,
    ) -> None:
        self._job, self._target, self._workdir, self._progress = job, target, workdir, progress
        self.counts, self._repairs = counts, repairs
        self._batched = batched
        self._editable = not counts or backend_named(target.backend).recoverable
        # If there is only one file to judge, use the figure that its proof reports. Among many candidates, some are
        # lucky, so use the loss to expect.
        seen_only = counts and not (self._editable and job.task is not None)
        loss_kind: LossKind = "seen" if seen_only else "expected"
        if repairs:
            loss_kind = "noise" if job.task is None else "seen" if isinstance(job.task, FloatAnswers) else "expected"
        meter_options: dict[str, Any] = {"task": job.task, "loss_kind": loss_kind, "memory": memory}
        self._accuracy = AccuracyMeter(
            job.validation,
            job.prepared.path,
            workdir,
            basis=job.basis,
            # A repair with labels or answers reports only losses.
            sliced=not repairs or job.task is None,
            float_outputs=job.float_outputs,
            progress=progress,
            **meter_options,
        )
        self._worker_job = None
        if job.workers is not None:
            self._worker_job = build_assessment_job(job.workers, job, **meter_options)
            if self._worker_job is None:
                progress.note("workers cannot read the validation samples themselves: accuracy is measured here")
        self.total = self._accuracy.total
        (workdir / "recover").mkdir(parents=True)
        self.builder = CandidateBuilder(job, target, workdir / "recover", progress)
        self._engines = engines or Engines()
        self._sessions = SessionPool(self._engines)
        self._clock = clock or LocalClock(self._sessions)
        self._ranker = LayerRanker(
            job,
            target,
            workdir,
            counts,
            self._accuracy,
            self.builder,
            self._engines,
            progress,
            by_tensors=repairs,
            profiled=profiled or not counts,
        )
        self._built: dict[str, Built] = {}
        self._digests: dict[str, tuple[str, str]] = {}
        self._shares: dict[str, float] = {}

    def built(self, candidate: Candidate) -> Built:
        """Return the build of `candidate`. The first call builds the file. All engines use the same file."""
        file = digest(candidate.replace(name="", engine=None))
        if file not in self._built:
            folder = Path(tempfile.mkdtemp(prefix="candidate-", dir=self._workdir))
            self._built[file] = self.builder.build(candidate, folder / "model.onnx")
        built = self._built[file]
        return replace(built, artifact=built.artifact.in_engine(candidate.engine)) if candidate.engine else built

    def build(self, candidate: Candidate) -> Screening:
        """See `Evaluator.build`. Outputs are compared on 8 samples. The share that runs in int8 is measured once for
        each structure.
        """
        start = time.perf_counter()
        artifact = self.built(candidate).artifact
        spent = time.perf_counter() - start
        compare = partial(self._accuracy.compare, count=SCREENED, model=candidate.name)
        if self._repairs:
            runtime_requirements(self._job, self._target, artifact)
        agreement = compare(self._proof_session(artifact))
        self._sessions.trim()
        finite = not any(output.nonfinite for output in agreement.outputs)
        if not finite and not self._repairs:
            raise CheckFailedError("its outputs are not finite, although the float model's are")
        board_agreement = self._clock.answers(artifact.model, artifact.settings(), compare)
        if board_agreement is not None:
            _check_answers(agreement, board_agreement)
        native_artifact = self.built(candidate.replace(engine=None)).artifact
        structure, content = self._digested(artifact)
        engine = candidate.engine.name if candidate.engine else ""
        return Screening(
            bytes=model_bytes(artifact.model),
            structure=with_engine(structure, engine),
            content=with_engine(content, engine),
            int8_mac_share=round(self._int8_mac_share(native_artifact), 6),
            wide_share=round(float(artifact.details.get("wide_share", 0.0)), 6),
            sqnr_db=max(_MIN_SQNR_DB, agreement.least_db) if finite else _MIN_SQNR_DB,
            build_s=round(spent, 3),
        )

    def assess(self, candidates: Sequence[Candidate], samples: int) -> dict[str, Assessment]:
        """See `Evaluator.assess`. A candidate never runs a sample twice."""
        assessments = {}
        with self._progress.stage(f"accuracy on {samples} samples", samples * len(candidates)) as advance:
            if self._worker_job is not None and self._job.workers is not None:
                artifacts = [(c.name, self.built(c).artifact, _can_run_together(c)) for c in candidates]
                for name, assessment in assess_on(self._job.workers, self._worker_job, artifacts, samples):
                    assessments[name] = self._with_doubt(assessment)
                    advance(samples)
                return assessments
            for candidate in candidates:
                session = partial(self._proof_session, self.built(candidate).artifact)
                assessment = self._accuracy.assess(
                    candidate.name, session, samples, advance, together=_can_run_together(candidate)
                )
                assessments[candidate.name] = self._with_doubt(assessment)
                self._sessions.trim()
        return assessments

    def simulate(self, candidate: Candidate, max_drop: float, seconds: float) -> Assessment | None:
        """See `Evaluator.simulate`. The number of samples doubles until it is 95 % certain whether the loss on all
        samples would be above or below `max_drop`. This takes at most some minutes.
        """
        artifact, deadline = self.built(candidate).artifact, BudgetClock(seconds)
        count = simulated_count(self._job.prepared, artifact)
        if count is None:
            return None
        overall = self.assess([candidate], self.total)[candidate.name]
        native_session = self._proof_session(artifact)
        limit, count = min(self.total, _SIMULATIONS * count), min(self.total, count, FEWEST_SAMPLES)
        with open_once(self._engines, artifact.model, artifact.settings()) as session:
            while True:
                with self._progress.stage(f"{candidate.name} in the simulator, {count} samples", count) as advance:
                    assessment, reach = self._accuracy.simulate(
                        candidate.name, native_session, session, count, overall, advance
                    )
                assessment = self._with_doubt(assessment)
                decided = abs(assessment.bound - max_drop) > reach
                previous_count, count = count, min(limit, 2 * count)
                # The next step would take as long as all steps so far.
                if decided or count == previous_count or deadline.remaining_s() < deadline.elapsed_s:
                    return assessment

    def proof_job(self, simulated: int | None) -> Job:
        """Return the job with the validation samples for a proof. They are stored already prepared, because reading
        images again may take longer than running the model. Workers read the samples themselves.

        Args:
            simulated: number of samples that `simulate` ran first, or None for all samples.
        """
        job = self._job
        if simulated is not None:
            positions = self._accuracy.samples.source_positions(simulated)
            known = job.float_outputs.select(positions) if job.float_outputs is not None else None
            return replace(job, validation=Subset(job.validation, positions), float_outputs=known)
        return job if job.workers is not None else replace(job, validation=self._accuracy.samples)

    def time(self, runners: Mapping[str, Runner], baseline: str, *, tie: float, seconds: float, rough: bool) -> Race:
        """See `Evaluator.time`. Small models run in several sessions each, in short bursts that take turns."""
        batch, feed = self._feed()
        in_sessions = len(runners) <= _RUNNERS_IN_SESSIONS and not rough
        count = count_sessions(self._job.prepared.path)
        count = count if in_sessions else min(count, FEWEST_SESSIONS)
        warmup = WarmUp(min_s=0.1, max_s=min(0.5, seconds / (4 * len(runners))))
        stop_rules = {
            "enough": UNDISTURBED_ROUNDS,
            "max_duration_s": seconds,
            **(_ROUGH_RACE if rough else _FINAL_RACE),
        }
        rank_options = {"top": 1, "keep": baseline, "tie": tie, **stop_rules}
        models = {name: self._model(*runner) for name, runner in runners.items()}
        with self._progress.stage(f"timing {len(runners)} runners") as advance:
            ranking = self._clock.race(
                models, feed, RaceRules(count, warmup, _BURSTS, rank_options), lambda: advance(1)
            )
        return build_race(ranking, baseline, batch=batch)

    def slow_layers(self, candidate: Candidate, float_threads: int) -> tuple[str, ...]:
        """See `Evaluator.slow_layers`. The layers are timed on the first sample."""
        if self.counts:
            return ()
        prepared, opener = self._job.prepared, self._clock.open_profiled
        artifact = self.built(candidate).artifact
        threads = (float_threads, candidate.threads)
        return find_slow_layers(
            prepared, artifact, self._feed()[1], *threads, backend=self._target.backend, opener=opener
        )

    def memory(self, candidate: Candidate | None, threads: int) -> int:
        """See `Evaluator.memory`. The session runs the first sample."""
        shapes = {name: list(array.shape) for name, array in self._accuracy.samples[0].inputs.items()}
        return self._clock.peak_memory(*self._model(candidate, threads), shapes)

    def float_metrics(self) -> dict[str, float]:
        """Return float32's metrics over all validation samples; empty without a task."""
        return self._accuracy.float_metrics()

    def recovery_groups(self) -> tuple[tuple[str, ...], ...]:
        """See `Evaluator.recovery_groups`. The groups contain only recoveries that affect what is built for the target,
        and that leave no node in float if the target has no float.

        There are no groups without calibration samples. There are also none for a simulated artifact that is not a Q/DQ
        model, unless the artifact is to be repaired.
        """
        if self._job.calibration is None or not (self._editable or self._repairs):
            return ()
        vain = find_ineffective(self._target)
        if self._target.profile.integer_only:
            vain |= {name for name, recovery in recoveries().items() if recovery.keeps_float}
        every = recovery_groups(complete=self._repairs)
        free, *costly = (tuple(name for name in group if name not in vain) for group in every)
        return (free, *(group for group in costly if group))

    def rank(self, candidate: Candidate, *, headroom: float, seconds: float) -> float_layers.LayerRanking:
        """See `Evaluator.rank`."""
        return self._ranker.rank(candidate, self.built(candidate), headroom=headroom, seconds=seconds)

    def _with_doubt(self, assessment: Assessment) -> Assessment:
        """Return the assessment whose bound is compared with the allowed loss.

        If speed is counted, the bound is the loss to expect, not the largest likely loss. More labels narrow the
        interval of a loss, more precision does not.
        """
        return replace(assessment, doubt=0.0) if self.counts else assessment

    def _proof_session(self, artifact: Artifact) -> Any:
        """Return a session of the model that represents the artifact in comparisons."""
        return self._sessions.sessions(*model_to_judge(artifact))[0]

    def _model(self, candidate: Candidate | None, threads: int) -> Model:
        if candidate is None:
            return self._job.prepared.path, build_float_settings(self._target.backend, threads)
        artifact = self.built(candidate).artifact
        return artifact.model, artifact.settings(threads=threads)

    def _feed(self) -> tuple[int, dict[str, Any]]:
        """Return the number of samples in a timed query, and the query's inputs by name."""
        inputs = dict(self._accuracy.samples[0].inputs)
        shapes = {spec.name: spec.shape or () for spec in self._job.prepared.signature.inputs}
        free = all(shapes[name] and not isinstance(shapes[name][0], int) for name in inputs)
        if not (self._batched and free and all(len(array) == 1 for array in inputs.values())):
            return 1, inputs
        return _BATCH, {name: np.repeat(array, _BATCH, axis=0) for name, array in inputs.items()}

    def _digested(self, artifact: Artifact) -> tuple[str, str]:
        """Return digests of an artifact's structure and of its content. They do not depend on the engine."""
        key = f"{artifact.proof_model} {sorted(artifact.session_options.items())}"
        if key not in self._digests:
            file = artifact.proof_model, artifact.session_options
            self._digests[key] = structure_digest(*file), content_digest(*file)
        return self._digests[key]

    def _int8_mac_share(self, artifact: Artifact) -> float:
        """Return the share of an artifact's multiply-accumulates that run in int8 in onnxruntime's own kernels. The
        share is measured once for each structure.
        """
        structure, _ = self._digested(artifact)
        if structure not in self._shares:
            coverage = artifact.coverage or measure_coverage(
                artifact.model,
                artifact.settings(),
                self._accuracy.samples[0].inputs,
                self._job.prepared.model,
                lambda name, op_type: "",
                macs=self._macs,
                opener=self._clock.open_profiled,
            )
            self._shares[structure] = coverage.int8_mac_share or 0.0
        return self._shares[structure]

    @cached_property
    def _macs(self) -> dict[str, int]:
        return count_macs(self._job.prepared.model, self._accuracy.samples[0].inputs)


def _can_run_together(candidate: Candidate) -> bool:
    """Return whether samples may run in one batch. Samples must run one by one if ranges are measured at run time,
    because one range would otherwise cover the whole batch.
    """
    return not candidate.quantized or (candidate.scheme.mode == "static" and not candidate.builder)


def _check_answers(local_agreement: Agreement, board_agreement: Agreement) -> None:
    """Refuse a candidate whose outputs are clearly further from float32's on another machine than on this one. The
    other machine would not reach the accuracy measured here.

    Raises:
        CheckFailedError: the outputs are clearly further away. The message contains both figures.
    """
    local_db, board_db = local_agreement.least_db, board_agreement.least_db
    if any(output.nonfinite for output in board_agreement.outputs) or board_db < local_db - _LOSS_DB:
        raise CheckFailedError(
            f"on the board its outputs follow float32 to {board_db:.1f} dB SQNR, here to {local_db:.1f} dB"
        )


def build_race(ranking: SpeedRanking, baseline: str, *, batch: int) -> Race:
    """Return a `Race` with the latencies of `ranking`, in milliseconds, and with the speed of each runner relative to
    the baseline, as far as it can be claimed.

    Args:
        batch: number of samples in a query.
    """
    distributions = ranking.distributions
    measured = {name: distribution.drop_disturbed() for name, distribution in distributions.items()}
    timings = {}
    for name, distribution in measured.items():
        figures = plain(distribution)
        figures["samples_per_s"] *= batch
        comparison = (make_claim(distributions[baseline], distributions[name]), measured[baseline].p50)
        timings[name] = StructureTiming(figures) if name == baseline else StructureTiming(figures, *comparison)
    edges = compute_shared_edges(list(measured.values()))
    counts = {name: count_bins(distribution, edges) for name, distribution in measured.items()}
    return Race(timings, ranking.settled, {"edges_ms": edges.tolist(), "counts": counts})


def find_slow_layers(
    prepared: PreparedModel,
    artifact: Artifact,
    feed: Mapping[str, Any],
    float_threads: int,
    threads: int,
    *,
    backend: str = "",
    opener: Callable[[Path, SessionSettings], Any] = open_session,
) -> tuple[str, ...]:
    """Name the layers that take longer in `artifact` than in its float model, `prepared`. The worst come first.

    Args:
        feed: the inputs of one query.
        float_threads, threads: threads of the float model and of the artifact.
        backend: the backend that built the artifact; its engine runs the float model as well.
        opener: see `edgeq.measure.kernels.profile`.
    """
    settings, quantized = build_float_settings(backend, float_threads), artifact.settings(threads=threads)
    spent: list[dict[str, float]] = []
    for path, session_settings in ((prepared.path, settings), (artifact.model, quantized)):
        spent.append({})
        # a layer may run as several kernels
        for kernel in kernel_times(path, session_settings, feed, prepared.model, opener=opener):
            spent[-1][kernel.name] = spent[-1].get(kernel.name, 0.0) + kernel.us
    macs = node_macs(prepared.model)
    layers = [node.name for node in prepared.model.graph if node.name and macs.get(node.name)]
    return find_slower_layers(layers, *spent)


def find_slower_layers(
    names: Sequence[str], float_us: Mapping[str, float], int8_us: Mapping[str, float]
) -> tuple[str, ...]:
    """Return the layers of `names` that take longer in integers. The layer that loses most time comes first.

    Args:
        float_us, int8_us: microseconds by layer in each model; layers that are not in both are left out.
    """
    threshold_us = _MIN_LOST_SHARE * sum(float_us.values())
    lost = {n: int8_us[n] - float_us[n] for n in names if n in float_us and n in int8_us}
    return tuple(sorted((n for n, us in lost.items() if us > threshold_us), key=lambda n: (-lost[n], n)))
