"""Evaluate models and time them in one pass over the samples.

Accuracy and latency both need about a hundred runs of each model. So edgeq times the runs of the evaluation itself:
each timed run takes the next sample. The models take turns in bursts, and each model runs at its own pace. A sample
waits until all models have run it. A model that has run all waiting samples runs the very first sample again. edgeq
decodes and evaluates outputs between rounds.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from edgeq_device.engines.cuda import read_shapes
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.latency import Distribution, Runner
from edgeq_device.measure.scenarios import make_runner

from edgeq.data.array_store import ArrayStore
from edgeq.data.samples import Sample, Samples
from edgeq.errors import DataError
from edgeq.measure.accuracy import Evaluation, RunningEvaluation
from edgeq.measure.inference import Outputs, Session, infer
from edgeq.measure.race import race
from edgeq.measure.task import Task
from edgeq.run.session import SessionSettings
from edgeq.util.display import SILENT, Advance, Progress

# Maximum number of samples that wait, and maximum number of bytes of these samples and their outputs.
_MOST_WAITING, _MOST_BYTES = 16, 2**26


def evaluate_timed(
    sessions: Mapping[str, Sequence[Any]],
    samples: Samples,
    *,
    task: Task | None = None,
    reference: str | None = None,
    settings: Mapping[str, SessionSettings] | None = None,
    known_outputs: Mapping[str, ArrayStore] = MappingProxyType({}),
    basis: Basis = EVERYTHING,
    progress: Progress = SILENT,
) -> tuple[Evaluation, Mapping[str, Distribution]]:
    """Run `evaluate_sessions` and `race` in one pass. The timing may end before or after the last sample.

    A sample whose shapes differ from those of the first sample is evaluated but not timed, because its run takes a
    different amount of work. A session in another process is timed in that process, on the first sample. Its runs on
    the other samples are not timed.

    Args:
        sessions: model name → the sessions of the model. They give the same outputs and are timed in turns.
        task, reference, settings, basis: see `evaluate_sessions`.
        known_outputs: model name → its outputs by the sample's place. edgeq runs known samples only to time the
            model. What is missing is added.

    Returns:
        The figures, and the latencies by name.

    Raises:
        DataError, CheckFailedError: for the same reasons as `evaluate_sessions`.
    """
    running = RunningEvaluation(tuple(sessions), task, reference, basis)
    with progress.stage("Evaluating and timing", len(samples)) as advance:
        line = _Line(sessions, samples, running, advance, known_outputs)
        timed = race(
            {name: [line.runner(name, s) for s in model_sessions] for name, model_sessions in sessions.items()},
            line.move_on,
        )
        line.finish()
    return running.result(settings or {}), timed


@dataclass
class _Waiting:
    """Hold a sample with its place, and the outputs of the models that have already run it."""

    place: int
    sample: Sample
    outputs: dict[str, Outputs]

    @property
    def nbytes(self) -> int:
        """Return the total size in bytes of the sample's inputs and of its outputs so far."""
        output_arrays = (array for outputs in self.outputs.values() for array in outputs.values())
        return sum(np.asarray(array).nbytes for array in (*self.sample.inputs.values(), *output_arrays))


class _Line:
    """Queue, in order, the samples that some models have not run yet.

    Args:
        running: evaluation to which each sample is added when all models have run it.
        advance: function that is called with the number of samples that were just added to the evaluation.
        known_outputs: model name → its outputs by the sample's place. What is missing is added.
    """

    def __init__(
        self,
        sessions: Mapping[str, Sequence[Any]],
        samples: Samples,
        running: RunningEvaluation,
        advance: Advance,
        known_outputs: Mapping[str, ArrayStore],
    ) -> None:
        self._known_outputs, self._joined = known_outputs, itertools.count()
        self._sessions = {name: model_sessions[0] for name, model_sessions in sessions.items()}
        # A session in another process times its own runs, so that the transfer of samples does not count.
        self._remote_names = {
            name for name, model_sessions in self._sessions.items() if hasattr(model_sessions, "query_runner")
        }
        self._samples: Iterator[Sample] = iter(samples)
        self._running, self._advance = running, advance
        first_sample = next(self._samples, None)
        if first_sample is None:
            raise DataError(f"{samples.source}: no samples to evaluate", "Point ⟨data⟩ at samples, or raise ⟨count⟩")
        self._spare_feed = dict(first_sample.inputs)
        self._shapes = read_shapes(first_sample.inputs)
        self._waiting: deque[_Waiting] = deque()
        # Size of a sample with its outputs, in bytes. It is 0 until the first sample is evaluated; until then, the
        # queue contains only this sample.
        self._largest = 0
        self._join(first_sample)

    def runner(self, name: str, session: Any) -> Runner:
        """Return a function that runs the next sample on a session of the model `name`."""
        if name in self._remote_names:
            elsewhere: Runner = make_runner(session, [self._spare_feed])
            return elsewhere
        return lambda: self._run(name, session)

    def _run(self, name: str, session: Session) -> None:
        for waiting in self._waiting:
            if name not in waiting.outputs:
                waiting.outputs[name] = infer(session, waiting.sample, model=name)
                return
        # Every timed run must be a full inference, also if no sample waits.
        session.run(None, self._spare_feed)

    def move_on(self) -> None:
        """Evaluate the samples that all models have run, and add new samples to the queue."""
        evaluated_count = 0
        while self._waiting and len(self._waiting[0].outputs) == len(self._sessions):
            oldest = self._waiting.popleft()
            self._largest = max(self._largest, oldest.nbytes)
            for name, known in self._known_outputs.items():
                if oldest.place not in known:
                    known.add(oldest.place, oldest.outputs[name])
            self._running.update(oldest.sample, oldest.outputs)
            evaluated_count += 1
        self._advance(evaluated_count)
        while len(self._waiting) < max(1, min(_MOST_WAITING, _MOST_BYTES // max(1, self._largest))):
            sample = next(self._samples, None)
            if sample is None:
                return
            self._join(sample)

    def _join(self, sample: Sample) -> None:
        place = next(self._joined)
        known = {name: outputs.get(place) for name, outputs in self._known_outputs.items() if place in outputs}
        self._waiting.append(_Waiting(place, sample, known))
        # A run on other shapes takes another time.
        untimed = self._remote_names if read_shapes(sample.inputs) == self._shapes else self._sessions
        self._complete(self._waiting[-1], untimed)

    def _complete(self, waiting: _Waiting, names: Iterable[str]) -> None:
        for name in names:
            if name not in waiting.outputs:
                waiting.outputs[name] = infer(self._sessions[name], waiting.sample, model=name)

    def finish(self) -> None:
        """Run the samples that were not reached during the timing."""
        while self._waiting:
            self._complete(self._waiting[0], self._sessions)
            self.move_on()
