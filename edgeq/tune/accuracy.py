"""Accuracy of candidates on growing numbers of samples, none of which a model sees twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from edgeq.data.samples import Sample, Samples
from edgeq.measure.agreement import Agreement, Comparison
from edgeq.measure.inference import Outputs, Session, infer
from edgeq.measure.resample import Measured, ResampledMeter, loss_error
from edgeq.measure.rows import rows
from edgeq.measure.task import Task
from edgeq.progress import SILENT, Progress
from edgeq.report.tuning_record import Assessment
from edgeq.session import open_session
from edgeq.tune.accuracy_estimate import AgreementEstimate, assess, sure
from edgeq.tune.recover.sensitivity import Columns
from edgeq.tune.store import MEMORY, ArrayStore, SampleStore
from edgeq.tune.together import alike, answers, gathered, joined, run_at_once

_TRIED = 4


class AccuracyMeter:
    """Compares sessions with float32 on validation samples. Samples, float32's outputs and what a candidate has shown
    so far are kept.

    Args:
        float_model: the model that is run for float32's outputs.
        task: what to measure by labels; None measures agreement with float32.
        seen_only: whether losses are those on the samples alone; see `accuracy_estimate.assess`.
        memory: bytes of samples and outputs to hold in memory; what is more goes to `workdir`.
    """

    def __init__(
        self,
        validation: Samples,
        float_model: Path,
        workdir: Path,
        *,
        task: Task | None = None,
        seen_only: bool = False,
        memory: int = MEMORY,
        progress: Progress = SILENT,
    ) -> None:
        self._task = task
        self._seen_only = seen_only
        self.samples = SampleStore(validation, workdir / "samples", memory=memory // 2, progress=progress)
        self._float_outputs = ArrayStore(workdir / "float", memory // 2)
        self._float_model = float_model
        self._float_metrics: dict[int, Measured] = {}
        self._float_meter: tuple[ResampledMeter | None, int] = None, 0
        self._estimates: dict[str, _Estimate] = {}

    @property
    def total(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def assess(
        self,
        name: str,
        session: Callable[[], Session],
        samples: int,
        advance: Callable[[int], None],
        *,
        together: bool = False,
    ) -> Assessment:
        """Accuracy of the model called `name` on the first `samples` samples.

        Args:
            session: opens it; not called where nothing is left to be run.
            advance: is called with the number of samples that were run just now.
            together: whether several may be run at once, where that changes no answer.
        """
        estimate = self._estimates.get(name)
        if estimate is None or estimate.seen > samples:
            estimate = self._estimates[name] = _Estimate(self._metric(), AgreementEstimate(Comparison(self._task)))
        if estimate.seen < samples:
            opened = session()
            most = self._most_at_once(opened) if together else 1
            while estimate.seen < samples:
                chosen = range(estimate.seen, min(samples, estimate.seen + most))
                taken = [self.samples[position] for position in chosen]
                if len(taken) > 1 and not alike(taken):
                    chosen, taken = chosen[:1], taken[:1]
                references = self._references(chosen)
                estimate.add(taken, references, answers(opened, taken, model=name))
                advance(len(chosen))
        labels = None
        if self._task is not None and estimate.metric is not None:
            labels = self._task, self._float_measured(samples), estimate.metric.measured()
        complete = samples >= self.total
        return assess(estimate.agreement, labels, complete=complete, seen_only=self._seen_only)

    def simulate(
        self,
        name: str,
        here: Callable[[], Session],
        there: Callable[[], Session],
        samples: int,
        whole: Assessment,
        advance: Callable[[int], None],
    ) -> Assessment:
        """The loss of the model called `name` in an engine that is too slow for all samples: what it loses here on all
        of them, plus what it loses more there on the first `samples` (the difference estimator of two-phase sampling).
        Answers that differ by roundings make that difference far less uncertain than the loss on so few.

        Args:
            here, there: open it in this machine's kernels, and in the engine.
            whole: what it loses here on all samples.
        """
        beside, name = f"{name}, beside", f"{name}, there"
        same = self.assess(beside, here, samples, lambda count: None)
        found = self.assess(name, there, samples, advance)
        if found.complete:
            return found
        drop = whole.drop + found.drop - same.drop
        mine, other = self._estimates[name].metric, self._estimates[beside].metric
        error = None
        if mine is not None and other is not None:
            error = loss_error(other.measured(), mine.measured(), least=1 / found.samples)
        low, high = sure(drop, error, (whole.high - whole.low) / 2)
        return replace(found, complete=True, drop=drop, low=low, high=high, expected=drop, doubt=0.0)

    def compare(self, session: Session, count: int, *, model: str) -> Agreement:
        """How closely the outputs follow float32's, on the first `count` samples."""
        comparison = Comparison()
        for position in range(min(count, self.total)):
            sample = self.samples[position]
            comparison.update(self._reference(position), infer(session, sample, model=model), sample.inputs)
        return comparison.result()

    def noise(self, session: Session, count: int, *, model: str) -> float:
        """Noise power over signal power at the outputs, mean over their columns, on the first `count` samples."""
        columns = Columns()
        for position in range(min(count, self.total)):
            columns.update(self._reference(position), infer(session, self.samples[position], model=model))
        return columns.noise

    def float_metrics(self) -> dict[str, float]:
        """float32's metrics over all samples; empty without a task."""
        return dict(self._float_measured(self.total).metrics) if self._task is not None else {}

    def _metric(self) -> ResampledMeter | None:
        return ResampledMeter(self._task) if self._task is not None else None

    def _float_measured(self, samples: int) -> Measured:
        """float32's metric over the first `samples`; one meter sees ever more of them."""
        if samples not in self._float_metrics:
            metric, seen = self._float_meter
            if metric is None or seen > samples:
                metric, seen = self._metric(), 0
            assert metric is not None
            for position in range(seen, samples):
                for row, outputs in rows(self.samples[position], {"float": self._reference(position)}):
                    metric.update(outputs["float"], row)
            self._float_metrics[samples] = metric.measured()
            self._float_meter = metric, samples
        return self._float_metrics[samples]

    def _reference(self, position: int) -> Outputs:
        """float32's outputs for the sample at `position`."""
        return self._references([position])[0]

    def _references(self, positions: Sequence[int]) -> list[Outputs]:
        """float32's outputs for the samples at `positions`, computed once."""
        missing = [position for position in positions if position not in self._float_outputs]
        if missing:
            session, most = self._float_session
            for start in range(0, len(missing), most):
                part = missing[start : start + most]
                made = answers(session, [self.samples[position] for position in part], model="float32")
                for position, outputs in zip(part, made, strict=True):
                    self._float_outputs.put(position, outputs)
        return [self._float_outputs.get(position) for position in positions]

    @cached_property
    def _float_session(self) -> tuple[Session, int]:
        """A session of the float model, and how many samples it runs at once."""
        session = open_session(self._float_model)
        return session, self._most_at_once(session)

    def _most_at_once(self, session: Session) -> int:
        return run_at_once(session, [self.samples[position] for position in range(min(_TRIED, self.total))])


@dataclass
class _Estimate:
    """A candidate's running figures, and how many samples they rest on."""

    metric: ResampledMeter | None
    agreement: AgreementEstimate
    seen: int = 0

    def add(self, samples: Sequence[Sample], references: Sequence[Outputs], candidates: Sequence[Outputs]) -> None:
        """Add samples, several only if they are single rows: the candidate's outputs against float32's, and against the
        label where there is one."""
        if len(samples) > 1:
            self.agreement.update(joined(references), joined(candidates), gathered(samples), rows=len(samples))
        for sample, reference, candidate in zip(samples, references, candidates, strict=True):
            for row, outputs in rows(sample, {"float": reference, "int8": candidate}):
                if len(samples) == 1:
                    self.agreement.update(outputs["float"], outputs["int8"], row)
                if self.metric is not None:
                    self.metric.update(outputs["int8"], row)
        self.seen += len(samples)
