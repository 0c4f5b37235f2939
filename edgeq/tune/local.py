"""The evaluator of this machine: the target's backend builds, ONNX Runtime runs."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.distribution import histogram, shared_edges
from edgeq_device.latency import Bursts, WarmUp
from edgeq_device.memory import measure_memory
from edgeq_device.ranking import rank_until_settled, ratio

from edgeq.data.samples import Sample
from edgeq.errors import CheckFailedError
from edgeq.hardware.target import Target
from edgeq.measure.agreement import Agreement, Comparison
from edgeq.measure.coverage import measure_coverage
from edgeq.measure.inference import Outputs, Session, infer
from edgeq.measure.kernels import KernelTime, kernel_times
from edgeq.measure.rows import rows
from edgeq.measure.task import Task
from edgeq.model.load import load_model
from edgeq.model.macs import node_macs
from edgeq.pipeline.builds import model_bytes
from edgeq.pipeline.job import Built, Job
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings, open_session
from edgeq.tune import builders
from edgeq.tune.accuracy_estimate import AgreementEstimate, Measured, MetricEstimate, assess
from edgeq.tune.candidate import Candidate
from edgeq.tune.evaluator import Exclusion, Race, Runner
from edgeq.tune.mixed import slower_in_integers
from edgeq.tune.record import Assessment, Screening, Timing
from edgeq.tune.recover import Recoverer
from edgeq.tune.store import MEMORY, ArrayStore, SampleStore
from edgeq.tune.structure import content_digest, structure_digest

_SCREENED = 8
_BLOCKS = 16
_BATCH = 8
_QUIETEST_DB = -200.0
# Two sessions of one small model differ by up to a fifth, by where their memory happens to lie: a race runs several.
_SESSIONS, _SMALL = 3, 2**25
# Short ones: what tells runners apart is the number of rounds. The pause is longer than any within a burst.
_BURSTS, _PAUSE_S = Bursts(0.025, 0.006), 0.02


class LocalEvaluator:
    """See `edgeq.tune.evaluator.Evaluator`."""

    def __init__(
        self,
        job: Job,
        target: Target,
        workdir: Path,
        *,
        task: Task | None = None,
        batched: bool = False,
        memory: int = MEMORY,
        progress: Progress = SILENT,
    ) -> None:
        """
        Args:
            task: what to measure by labels; None measures agreement with float32.
            batched: time batches of 8 where the model's first axis is open, for throughput.
        """
        self._job = job
        self._target = target
        self._workdir = workdir
        self._task = task
        self._batched = batched
        self._progress = progress
        self._samples = SampleStore(job.validation, workdir / "samples", memory=memory // 2, progress=progress)
        self._float_outputs = ArrayStore(workdir / "float", memory // 2)
        self._built: dict[str, Built] = {}
        (workdir / "recover").mkdir()
        self._recoverer = Recoverer(job, target, workdir / "recover")
        self._estimates: dict[str, _Estimate] = {}
        self._float_metrics: dict[int, Measured] = {}
        self._float_session: Session | None = None
        self._shares: dict[str, float] = {}

    @property
    def total(self) -> int:
        return len(self._samples)

    def built(self, candidate: Candidate) -> Built:
        """The artifact of `candidate`, made when it is first asked for."""
        if candidate.name not in self._built:
            place = Path(tempfile.mkdtemp(prefix="candidate-", dir=self._workdir))
            self._built[candidate.name] = self._build(candidate, place / "model.onnx")
        return self._built[candidate.name]

    def screen(self, candidate: Candidate) -> Screening:
        start = time.perf_counter()
        built = self.built(candidate)
        spent = time.perf_counter() - start
        artifact = built.artifact
        agreement = self._compare(built, candidate.name)
        if any(output.nonfinite for output in agreement.outputs):
            raise CheckFailedError("its outputs are not finite where the float model's are")
        structure = structure_digest(artifact.model, artifact.session_options)
        if structure not in self._shares:
            self._shares[structure] = self._coverage(built)
        return Screening(
            bytes=model_bytes(artifact.model),
            structure=structure,
            content=content_digest(artifact.model, artifact.session_options),
            int8_mac_share=round(self._shares[structure], 6),
            sqnr_db=max(_QUIETEST_DB, agreement.sqnr_db),
            build_s=round(spent, 3),
        )

    def assess(self, candidates: Sequence[Candidate], samples: int) -> dict[str, Assessment]:
        found: dict[str, Assessment] = {}
        with self._progress.stage(f"accuracy on {samples} samples", samples * len(candidates)) as advance:
            for candidate in candidates:
                found[candidate.name] = self._assess(candidate, samples, advance)
        return found

    def race(
        self, runners: Mapping[str, Runner], baseline: str, *, top: int | None, tie: float, seconds: float
    ) -> Race:
        batch, feed = self._feed()
        few = model_bytes(self._job.prepared.path) <= _SMALL
        ranking = rank_until_settled(
            {
                name: in_turn([self._session(*runner) for _ in range(_SESSIONS if few else 1)], feed)
                for name, runner in runners.items()
            },
            top=top,
            tie=tie,
            max_duration_s=seconds,
            warmup=WarmUp(min_s=0.1, max_s=1.0),
            bursts=_BURSTS,
        )
        measured = ranking.distributions
        timings = {}
        for name, distribution in measured.items():
            figures = distribution.to_dict()
            figures["samples_per_s"] *= batch
            against = None if name == baseline else ratio(measured[baseline], distribution).to_dict()
            timings[name] = Timing(figures, against)
        edges = shared_edges(list(measured.values()))
        counts = {name: histogram(distribution, edges) for name, distribution in measured.items()}
        return Race(timings, ranking.order, ranking.settled, {"edges_ms": edges.tolist(), "counts": counts})

    def slow_layers(self, candidate: Candidate, float_threads: int) -> tuple[str, ...]:
        source = load_model(self._job.prepared.path, external_data="none")
        artifact = self.built(candidate).artifact
        feed = self._feed()[1]
        settings = SessionSettings(intra_op_threads=float_threads)
        in_float = by_layer(kernel_times(self._job.prepared.path, settings, feed, source))
        in_int8 = by_layer(kernel_times(artifact.model, artifact.settings(threads=candidate.threads), feed, source))
        macs = node_macs(self._job.prepared.model)
        return slower_in_integers([n.name for n in source.graph.node if macs.get(n.name)], in_float, in_int8)

    def memory(self, candidate: Candidate | None, threads: int) -> int:
        shapes = {name: list(array.shape) for name, array in self._samples[0].inputs.items()}
        if candidate is None:
            return measure_memory(self._job.prepared.path, shapes=shapes, threads=threads).session_peak_bytes
        artifact = self.built(candidate).artifact
        return measure_memory(
            artifact.model,
            shapes=shapes,
            providers=(artifact.provider,),
            provider_options=artifact.provider_options,
            config=artifact.session_options,
            threads=threads,
        ).session_peak_bytes

    def float_metrics(self) -> dict[str, float]:
        """float32's metrics over all validation samples; empty without a task."""
        return dict(self._float_measured(self.total).metrics) if self._task is not None else {}

    def recoveries(self) -> tuple[tuple[str, ...], ...]:
        return builders.recoveries() if self._job.calibration is not None else ()

    def exclude(self, candidate: Candidate, wanted: Exclusion) -> None:
        self._progress.note(f"looking for the layers of {candidate.name} to keep in float")
        builders.exclude(
            self._job, self._target, candidate, wanted, self._recoverer, self._noise, progress=self._progress
        )

    def _assess(self, candidate: Candidate, samples: int, advance: Callable[[int], None]) -> Assessment:
        estimate = self._estimates.get(candidate.name)
        if estimate is None or estimate.seen > samples:
            estimate = self._estimates[candidate.name] = _Estimate(self._metric())
        if estimate.seen < samples:
            artifact = self.built(candidate).artifact
            session = open_session(artifact.model, artifact.settings())
            for position in range(estimate.seen, samples):
                sample = self._samples[position]
                made = {"float": self._reference(position), "int8": infer(session, sample, model=candidate.name)}
                for row, outputs in rows(sample, made):
                    estimate.update(row, outputs["float"], outputs["int8"])
                estimate.seen += 1
                advance(1)
        labels = None
        if self._task is not None and estimate.metric is not None:
            labels = self._task, self._float_measured(samples), estimate.metric.measured()
        return assess(estimate.agreement, labels, complete=samples >= self.total)

    def _build(self, candidate: Candidate, destination: Path) -> Built:
        return builders.build(self._job, self._target, candidate, destination, self._recoverer, self._progress)

    def _noise(self, candidate: Candidate) -> float:
        """Noise power over signal power of the worst output, on a few samples, of a candidate that is not kept."""
        with tempfile.TemporaryDirectory(dir=self._workdir) as folder:
            place = Path(folder) / "model.onnx"
            built = self._build(candidate, place)
            return float(10 ** (-self._compare(built, candidate.name).sqnr_db / 10))

    def _compare(self, built: Built, name: str) -> Agreement:
        session = open_session(built.artifact.model, built.artifact.settings())
        comparison = Comparison()
        for position in range(min(_SCREENED, self.total)):
            comparison.update(self._reference(position), infer(session, self._samples[position], model=name))
        return comparison.result()

    def _metric(self) -> MetricEstimate | None:
        return MetricEstimate(self._task, max(1, self.total // _BLOCKS)) if self._task is not None else None

    def _float_measured(self, samples: int) -> Measured:
        """float32's metric over the first `samples`, computed once for each such number."""
        if samples not in self._float_metrics:
            metric = self._metric()
            assert metric is not None
            for position in range(samples):
                made = {"float": self._reference(position)}
                for row, outputs in rows(self._samples[position], made):
                    metric.update(outputs["float"], row)
            self._float_metrics[samples] = metric.measured()
        return self._float_metrics[samples]

    def _reference(self, position: int) -> Outputs:
        """float32's outputs for the sample at `position`, computed once."""
        if position not in self._float_outputs:
            if self._float_session is None:
                self._float_session = open_session(self._job.prepared.path)
            self._float_outputs.put(position, infer(self._float_session, self._samples[position], model="float32"))
        return self._float_outputs.get(position)

    def _session(self, candidate: Candidate | None, threads: int) -> Any:
        if candidate is None:
            return open_session(self._job.prepared.path, SessionSettings(intra_op_threads=threads))
        artifact = self.built(candidate).artifact
        return open_session(artifact.model, artifact.settings(threads=threads))

    def _feed(self) -> tuple[int, dict[str, Any]]:
        """What a timed query runs: (samples in it, inputs)."""
        inputs = dict(self._samples[0].inputs)
        shapes = {spec.name: spec.shape or () for spec in self._job.prepared.signature.inputs}
        free = all(shapes[name] and not isinstance(shapes[name][0], int) for name in inputs)
        if not (self._batched and free and all(len(array) == 1 for array in inputs.values())):
            return 1, inputs
        return _BATCH, {name: np.repeat(array, _BATCH, axis=0) for name, array in inputs.items()}

    def _coverage(self, built: Built) -> float:
        source = load_model(self._job.prepared.path, external_data="none")
        feed = self._samples[0].inputs
        settings = built.artifact.settings()
        return measure_coverage(built.artifact.model, settings, feed, source, lambda name, op_type: "").share


def in_turn(
    sessions: Sequence[Any], feed: Mapping[str, Any], clock: Callable[[], float] = time.perf_counter
) -> Callable[[], object]:
    """Runs one of the sessions, and the next one after a pause.

    Not the next one at every call: the threads of the one before would still be awake, and take a core from it.
    """
    turns = itertools.cycle(sessions)
    session, ended = next(turns), clock()

    def run() -> object:
        nonlocal session, ended
        if clock() - ended > _PAUSE_S:
            session = next(turns)
        made = session.run(None, feed)
        ended = clock()
        return made

    return run


def by_layer(kernels: Sequence[KernelTime]) -> dict[str, float]:
    """Microseconds by source node: a layer may run as several kernels."""
    found: dict[str, float] = {}
    for kernel in kernels:
        found[kernel.name] = found.get(kernel.name, 0.0) + kernel.us
    return found


@dataclass
class _Estimate:
    """A candidate's running figures, and how many samples they rest on."""

    metric: MetricEstimate | None
    agreement: AgreementEstimate = field(default_factory=AgreementEstimate)
    seen: int = 0

    def update(self, sample: Sample, reference: Outputs, candidate: Outputs) -> None:
        self.agreement.update(reference, candidate, sample)
        if self.metric is not None:
            self.metric.update(candidate, sample)
