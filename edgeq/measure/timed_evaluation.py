"""Accuracy and latency of several models in one pass over the samples.

Both need each model to run about a hundred times, so the runs that are timed are the evaluation's: what the race asks
for next is the next sample. Models take turns in bursts and go at their own pace, so samples wait until all have run
them; a model that has run all that wait runs the very first one again. Decoding and judging happen between rounds.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from edgeq_device.binding import shapes_of
from edgeq_device.distribution import Distribution
from edgeq_device.latency import Runner
from edgeq_device.scenarios import query_runner

from edgeq.errors import DataError
from edgeq.measure.accuracy import Evaluation, RunningEvaluation
from edgeq.measure.inference import Outputs, Session, infer
from edgeq.measure.race import race
from edgeq.measure.task import Task
from edgeq.progress import SILENT, Advance, Progress
from edgeq.session import SessionSettings

if TYPE_CHECKING:
    from edgeq.data.samples import Sample, Samples

# Samples that wait at most, and the bytes of them with their outputs.
_MOST_WAITING, _MOST_BYTES = 16, 2**26


def evaluate_timed(
    sessions: Mapping[str, Sequence[Any]],
    samples: Samples,
    *,
    task: Task | None = None,
    reference: str | None = None,
    settings: Mapping[str, SessionSettings] | None = None,
    known: Mapping[str, Sequence[Outputs]] = MappingProxyType({}),
    progress: Progress = SILENT,
) -> tuple[Evaluation, Mapping[str, Distribution]]:
    """`evaluate_sessions` in the same pass as `race`, which may end before or after the samples do.

    Samples of another shape than the first one's are judged, not timed: the models would be timed on different work.
    So are all where a session is in another process, which is timed there, on the first sample.

    Args:
        sessions: name → sessions of that model, which are timed in turns and answer alike.
        task, reference, settings, known: as `evaluate_sessions` has them; what is known is run to be timed alone.

    Returns:
        The figures, and latencies by name.

    Raises:
        DataError, CheckFailedError: as `evaluate_sessions`.
    """
    running = RunningEvaluation(tuple(sessions), task, reference)
    with progress.stage("Evaluating and timing", len(samples)) as advance:
        line = _Line(sessions, samples, running, advance, known)
        timed = race({name: [line.runner(name, s) for s in own] for name, own in sessions.items()}, line.move_on)
        line.finish()
    return running.result(settings or {}, progress), timed


@dataclass
class _Waiting:
    """A sample, and what the models that have run it made of it."""

    sample: Sample
    outputs: dict[str, Outputs]

    @property
    def nbytes(self) -> int:
        """Of the sample's inputs and of all outputs that are held."""
        made = (array for outputs in self.outputs.values() for array in outputs.values())
        return sum(np.asarray(array).nbytes for array in (*self.sample.inputs.values(), *made))


class _Line:
    """The samples that wait, in order.

    Args:
        running: is given each sample that all models have run.
        advance: is called with the number of those.
        known: outputs by model, for each sample.
    """

    def __init__(
        self,
        sessions: Mapping[str, Sequence[Any]],
        samples: Samples,
        running: RunningEvaluation,
        advance: Advance,
        known: Mapping[str, Sequence[Outputs]],
    ) -> None:
        self._known, self._joined = known, itertools.count()
        self._sessions = {name: own[0] for name, own in sessions.items()}
        self._elsewhere = {name for name, own in self._sessions.items() if hasattr(own, "query_runner")}
        self._samples: Iterator[Sample] = iter(samples)
        self._running, self._advance = running, advance
        first = next(self._samples, None)
        if first is None:
            raise DataError(f"{samples.source}: no samples to evaluate", "Point --data at samples, or raise --count")
        self._again = dict(first.inputs)
        self._shapes = shapes_of(first.inputs)
        self._waiting: deque[_Waiting] = deque()
        self._largest = 0  # bytes; known when the first sample is judged, until which no other joins
        self._join(first)

    def runner(self, name: str, session: Any) -> Runner:
        """Runs the next sample on a session of the model `name`."""
        if name in self._elsewhere:
            elsewhere: Runner = query_runner(session, [self._again])
            return elsewhere
        return lambda: self._run(name, session)

    def _run(self, name: str, session: Session) -> None:
        for waiting in self._waiting:
            if name not in waiting.outputs:
                waiting.outputs[name] = infer(session, waiting.sample, model=name)
                return
        session.run(None, self._again)

    def move_on(self) -> None:
        """Judge the samples that all models have run, and let others join."""
        done = 0
        while self._waiting and len(self._waiting[0].outputs) == len(self._sessions):
            first = self._waiting.popleft()
            self._largest = max(self._largest, first.nbytes)
            self._running.update(first.sample, first.outputs)
            done += 1
        self._advance(done)
        while len(self._waiting) < max(1, min(_MOST_WAITING, _MOST_BYTES // max(1, self._largest))):
            sample = next(self._samples, None)
            if sample is None:
                return
            self._join(sample)

    def _join(self, sample: Sample) -> None:
        place = next(self._joined)
        self._waiting.append(_Waiting(sample, {name: outputs[place] for name, outputs in self._known.items()}))
        untimed = self._elsewhere if shapes_of(sample.inputs) == self._shapes else self._sessions
        self._complete(self._waiting[-1], untimed)

    def _complete(self, waiting: _Waiting, names: Iterable[str]) -> None:
        for name in names:
            if name not in waiting.outputs:
                waiting.outputs[name] = infer(self._sessions[name], waiting.sample, model=name)

    def finish(self) -> None:
        """Run what the race has left."""
        while self._waiting:
            self._complete(self._waiting[0], self._sessions)
            self.move_on()
