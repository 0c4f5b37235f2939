"""Measure the accuracy of candidates on growing numbers of samples. A model never runs a sample twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.pairs import pair_outputs

from edgeq.data.array_store import ArrayStore
from edgeq.data.sample import Sample
from edgeq.data.samples import Samples
from edgeq.measure.agreement import Agreement
from edgeq.measure.comparison import OutputSums
from edgeq.measure.inference import Outputs, Session, infer
from edgeq.measure.resample import ResampledMeter, RowMetrics, loss_error
from edgeq.measure.rows import split_rows
from edgeq.measure.task import Task
from edgeq.run.session import open_session
from edgeq.tuning.accuracy_estimate import (
    AgreementEstimate,
    LossKind,
    assess,
    confidence_interval,
    estimate_extra_loss,
    rare_row_error,
)
from edgeq.tuning.batches import can_batch, find_batch_size, infer_all, join_outputs, join_samples
from edgeq.tuning.measurements import Assessment
from edgeq.tuning.recover.layer_noise import ColumnNoise
from edgeq.tuning.sample_store import SampleStore
from edgeq.tuning.sessions import STORED
from edgeq.util.display import SILENT, Progress

_BATCH_TEST_SAMPLES = 4


class AccuracyMeter:
    """Compare sessions with float32 on validation samples. The meter keeps the samples, float32's outputs, and the
    measurements of each candidate so far.

    Args:
        float_model: the model that computes float32's outputs.
        task: what to measure by labels; None measures agreement with float32.
        loss_kind: the figure to compare with the allowed loss; see `accuracy_estimate.Held`.
        basis: what the figures of the outputs are taken over.
        sliced: whether `assess` compares the slices of outputs, too. With a task, no loss depends on them.
        float_outputs: float32's outputs by the sample's place in `validation`. What is missing is computed and added.
            None computes all.
        memory: bytes of samples and outputs to keep in memory; the rest goes to `workdir`.
    """

    def __init__(
        self,
        validation: Samples,
        float_model: Path,
        workdir: Path,
        *,
        task: Task | None = None,
        loss_kind: LossKind = "expected",
        basis: Basis = EVERYTHING,
        sliced: bool = True,
        float_outputs: ArrayStore | None = None,
        memory: int = STORED,
        progress: Progress = SILENT,
    ) -> None:
        self._task = task
        self._loss_kind = loss_kind
        self._basis = basis
        self._sliced = sliced
        # Half of the memory goes to the samples and half to float32's outputs, because every comparison needs both.
        self.samples = SampleStore(validation, workdir / "samples", memory=memory // 2, progress=progress)
        if float_outputs is None:
            float_outputs = ArrayStore(workdir / "float", memory // 2)
        self._float_outputs = float_outputs
        self._float_model = float_model
        self._float_metrics: dict[int, RowMetrics] = {}
        self._float_meter: tuple[ResampledMeter | None, int] = None, 0
        self._estimates: dict[str, _Estimate] = {}
        self._pairs: dict[str, _Pair] = {}

    @property
    def total(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def assess(
        self,
        name: str,
        opener: Callable[[], Session],
        samples: int,
        advance: Callable[[int], None],
        *,
        together: bool = False,
    ) -> Assessment:
        """Return the accuracy of the model called `name` on the first `samples` samples.

        Args:
            opener: a function that opens the session. It is not called if no samples are left to run.
            advance: a function that is called with the number of samples that just ran.
            together: whether several samples may run in one batch, if that does not change the outputs.
        """
        estimate = self._estimates.get(name)
        # An estimate cannot give samples back, so fewer samples than before need a new one.
        if estimate is None or estimate.sample_count > samples:
            estimate = self._estimates[name] = self._start_estimate(sliced=self._sliced)
        if estimate.sample_count < samples:
            session = opener()
            batch_size = self._find_batch_size(session) if together else 1
            while estimate.sample_count < samples:
                positions = range(estimate.sample_count, min(samples, estimate.sample_count + batch_size))
                batch = [self.samples[position] for position in positions]
                # Later samples may differ in shape from those on which the batch size was found.
                if len(batch) > 1 and not can_batch(batch):
                    positions, batch = positions[:1], batch[:1]
                references = self._references(positions)
                estimate.add(batch, references, infer_all(session, batch, model=name))
                advance(len(positions))
        return self._assess_estimate(estimate)

    def simulate(
        self,
        name: str,
        native_session: Session,
        engine_session: Session,
        samples: int,
        overall: Assessment,
        advance: Callable[[int], None],
    ) -> tuple[Assessment, float]:
        """Estimate the loss of the model called `name` in an engine that is too slow to run all samples. Only the first
        `samples` samples run in both engines. The estimate is the loss in this machine's kernels on all samples, plus
        an estimate of the additional loss in the slow engine (`loses_more`).

        Args:
            native_session, engine_session: sessions of the model in this machine's kernels, and in the slow engine.
            overall: the model's assessment in this machine's kernels on all samples.

        Returns:
            The assessment, and half the width of a 95 % interval: how far the estimate may be from the engine's loss on
                all samples.
        """
        pair = self._pairs.setdefault(name, _Pair(self._start_estimate(), self._start_estimate()))
        for position in range(pair.engine.sample_count, samples):
            sample, reference = [self.samples[position]], self._references([position])
            (native_outputs,), (engine_outputs,) = (
                infer_all(session, sample, model=name) for session in (native_session, engine_session)
            )
            pair.native.add(sample, reference, [native_outputs])
            pair.engine.add(sample, reference, [engine_outputs])
            pair.between.update(native_outputs, engine_outputs, sample[0].inputs)
            advance(1)
        native, assessment = (self._assess_estimate(estimate) for estimate in (pair.native, pair.engine))
        if assessment.complete or assessment.low >= 1:  # all samples ran, or the outputs are not finite
            return replace(assessment, complete=True), 0.0
        error = None
        # Without labels there is no error to weigh, and the difference of the losses counts as it is.
        if pair.native.metric is not None and pair.engine.metric is not None:
            measured = pair.native.metric.measured(), pair.engine.metric.measured()
            error = loss_error(*measured, further=rare_row_error(measured[1], None, assessment.samples))
        more, error = estimate_extra_loss(native, assessment, error, overall, pair.between.result().least_db)
        drop = overall.drop + more
        # The uncertainty of the difference and that of the loss on all samples count as independent.
        low, high = confidence_interval(drop, error, (overall.high - overall.low) / 2)
        assessment = replace(
            assessment, complete=True, drop=drop, low=low, high=high, expected=overall.expected + more, doubt=0.0
        )
        # Samples that ran are no longer uncertain: as their share grows, the estimate approaches the engine's loss.
        return assessment, math.sqrt(1 - samples / self.total) * (confidence_interval(0.0, error)[1])

    def compare(self, session: Session, count: int, *, model: str) -> Agreement:
        """Return the agreement of the session's outputs with float32's on the first `count` samples."""
        comparison = OutputSums(basis=self._basis)
        for position in range(min(count, self.total)):
            sample = self.samples[position]
            comparison.update(self._reference(position), infer(session, sample, model=model), sample.inputs)
        return comparison.result()

    def measure_noise(self, session: Session, count: int, *, model: str) -> float:
        """Return the noise power divided by the signal power of the outputs on the first `count` samples, averaged over
        the outputs' columns.
        """
        columns = ColumnNoise()
        for position in range(min(count, self.total)):
            sample = self.samples[position]
            outputs = infer(session, sample, model=model)
            for pair in pair_outputs(self._basis, self._reference(position), outputs, sample.inputs):
                r, c = pair.to_numbers()
                columns.update({pair.name: r}, {pair.name: c})
        return columns.noise

    def float_metrics(self) -> dict[str, float]:
        """Return float32's metrics over all samples; empty without a task."""
        return dict(self._measure_float(self.total).metrics) if self._task is not None else {}

    def _start_estimate(self, *, sliced: bool = True) -> _Estimate:
        """Return an estimate without any samples yet."""
        metric = None if self._task is None else ResampledMeter(self._task)
        return _Estimate(metric, AgreementEstimate(OutputSums(self._task, self._basis, sliced)))

    def _assess_estimate(self, estimate: _Estimate) -> Assessment:
        """Return the assessment of a model on the samples that it has run so far."""
        labels = None
        if self._task is not None and estimate.metric is not None:
            labels = self._task, self._measure_float(estimate.sample_count), estimate.metric.measured()
        complete = estimate.sample_count >= self.total
        return assess(estimate.agreement, labels, complete=complete, loss_kind=self._loss_kind)

    def _measure_float(self, samples: int) -> RowMetrics:
        """Return float32's metric over the first `samples` samples. If a later call has more samples, only the new ones
        are measured.
        """
        if samples not in self._float_metrics:
            metric, measured_count = self._float_meter
            # The meter only adds rows, so a smaller number of samples starts again.
            if metric is None or measured_count > samples:
                assert self._task is not None
                metric, measured_count = ResampledMeter(self._task), 0
            for position in range(measured_count, samples):
                for row, outputs in split_rows(self.samples[position], {"float": self._reference(position)}):
                    metric.update(outputs["float"], row)
            self._float_metrics[samples] = metric.measured()
            self._float_meter = metric, samples
        return self._float_metrics[samples]

    def _reference(self, position: int) -> Outputs:
        """Return float32's outputs for the sample at `position`."""
        return self._references([position])[0]

    def _references(self, positions: Sequence[int]) -> list[Outputs]:
        """Return float32's outputs for the samples at `positions`. Each output is computed only once."""
        places = {position: self.samples.source_position(position) for position in positions}
        known = {p: self._float_outputs.get(place) for p, place in places.items() if place in self._float_outputs}
        missing = [position for position in positions if position not in known]
        if missing:
            session, batch_size = self._float_session
            for start in range(0, len(missing), batch_size):
                part = missing[start : start + batch_size]
                batch_outputs = infer_all(session, [self.samples[position] for position in part], model="float32")
                for position, outputs in zip(part, batch_outputs, strict=True):
                    self._float_outputs.add(places[position], outputs)
                    known[position] = outputs
        return [known[position] for position in positions]

    @cached_property
    def _float_session(self) -> tuple[Session, int]:
        """Return a session of the float model, and the number of samples that it runs at once."""
        session = open_session(self._float_model)
        return session, self._find_batch_size(session)

    def _find_batch_size(self, session: Session) -> int:
        return find_batch_size(
            session, [self.samples[position] for position in range(min(_BATCH_TEST_SAMPLES, self.total))]
        )


@dataclass
class _Estimate:
    """Hold a candidate's measurements so far, and the number of samples that they come from."""

    metric: ResampledMeter | None
    agreement: AgreementEstimate
    sample_count: int = 0

    def add(self, samples: Sequence[Sample], references: Sequence[Outputs], candidates: Sequence[Outputs]) -> None:
        """Add samples with the outputs of float32 and of the candidate. The candidate is compared with float32, and
        with the label if there is one. If there are several samples, each must be a single row.
        """
        # One comparison of joined rows costs far less than one for each row.
        if len(samples) > 1:
            self.agreement.update(
                join_outputs(references), join_outputs(candidates), join_samples(samples), rows=len(samples)
            )
        for sample, reference, candidate in zip(samples, references, candidates, strict=True):
            for row, outputs in split_rows(sample, {"float": reference, "int8": candidate}):
                if len(samples) == 1:
                    self.agreement.update(outputs["float"], outputs["int8"], row)
                if self.metric is not None:
                    self.metric.update(outputs["int8"], row)
        self.sample_count += len(samples)


@dataclass
class _Pair:
    """Hold the measurements of one model in two engines on the same samples, and how closely the engines agree."""

    native: _Estimate
    engine: _Estimate
    between: OutputSums = field(default_factory=OutputSums)
