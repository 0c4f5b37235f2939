"""One float32 pass of a model over samples: what every tensor held, in memory that does not grow with the samples."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.calibrate.instrumented import InstrumentedModel
from edgeq.calibrate.observer import Observer, Seen, dtype_name
from edgeq.calibrate.partition import partition_tensors
from edgeq.calibrate.statistics import Statistics, TensorStatistics
from edgeq.calibrate.tensors import Derived, Plan, plan, quantizable_tensors
from edgeq.errors import CalibrationError, DataError, EdgeqError
from edgeq.graph.index import GraphIndex
from edgeq.hardware.limits import usable_threads
from edgeq.model.shapes import element_types
from edgeq.progress import SILENT, Progress

MOST_WORKERS = 4
"""More samples at once than this gain nothing: counting takes turns."""


class SampleLike(Protocol):
    """One sample of the data."""

    @property
    def name(self) -> str:
        """What messages call it: a file, or its number."""

    @property
    def inputs(self) -> Mapping[str, NDArray[Any]]:
        """Input name → array, of the types and shapes of the model's inputs."""


class SamplesLike(Protocol):
    """Data that can be gone through several times, in the same order."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[SampleLike]: ...
    def digest(self) -> str:
        """Identifies the data: the same samples in the same order have the same digest."""


Checkpoint = Callable[[Statistics], None]


def collect(
    model: ir.Model,
    samples: SamplesLike,
    tensors: Sequence[str] | None = None,
    *,
    model_digest: str = "",
    memory: int | None = None,
    progress: Progress = SILENT,
    channels: Mapping[str, int] | None = None,
    workers: int | None = None,
    every_element: bool = False,
    start: Statistics | None = None,
    checkpoint: Checkpoint | None = None,
    checkpoint_seconds: float = 30.0,
) -> Statistics:
    """Run the float model once over the samples and keep, per tensor, extrema, count and histogram.

    Samples run several at a time, each on few threads; all totals are integers or extrema, so the result does not
    depend on which finishes first.

    Args:
        model: any valid float model, external data allowed; it is not changed.
        samples: run in order, each once.
        tensors: names to record; None means `quantizable_tensors`.
        model_digest: of the model's file; by it the statistics are recognised later. "" where they are not kept.
        memory: bytes that activations under observation may take. A model with more is run in several passes, each over
            all samples and for a part of the tensors. None: no limit.
        channels: channel axis by tensor name, for tensors whose extrema are wanted per channel too.
        workers: samples run at the same time; None lets the number of cores decide.
        every_element: count all elements of large tensors too, see `edgeq.calibrate.observer.PLENTY`.
        start: unfinished statistics of the same model, data and tensors to continue.
        checkpoint: called with the statistics so far, now and then and when interrupted (Ctrl-C).

    Raises:
        CalibrationError: a value is NaN or infinite (names tensor and sample), or `start` belongs to something else.
        DataError: there are no samples, or ONNX Runtime refuses one.
    """
    total = len(samples)
    if total == 0:
        raise DataError("there are no samples to calibrate with", "Give at least one")
    channels = dict(channels or {})
    names = _known_floats(model, tuple(tensors) if tensors is not None else quantizable_tensors(model))
    data_digest = samples.digest()
    state = _initial(start, model_digest, data_digest, names, total)
    workers = workers or min(MOST_WORKERS, usable_threads())
    partitions, workers = partition_tensors(model, names, state, samples, total, memory, workers)

    def snapshot() -> Statistics:
        """The statistics as they are now; samples that every tensor has been through count as done."""
        done = min((t.samples for t in state.values()), default=total)
        return Statistics(model_digest, data_digest, done, state, total)

    def save() -> None:
        if checkpoint is not None:
            checkpoint(snapshot())

    with progress.stage(f"calibrating {len(names)} tensors", total * len(partitions)) as advance:
        for partition in partitions:
            steps = _Pass(model, plan(model, partition, channels), state, channels, workers, every_element)
            done = state[partition[0]].samples
            advance(done)
            remaining = itertools.islice(enumerate(samples), done, None)
            _observe_all(steps, remaining, state, advance, save, checkpoint_seconds)
    return snapshot()


def _observe_all(
    steps: _Pass,
    samples: Iterable[tuple[int, SampleLike]],
    state: dict[str, TensorStatistics],
    advance: Callable[[int], None],
    save: Callable[[], None],
    save_seconds: float,
) -> None:
    """Run one pass over its samples and put what it saw into `state`."""
    saved = time.monotonic()
    try:
        for _ in steps.run(samples):
            advance(1)
            if time.monotonic() - saved > save_seconds:
                steps.drain()
                state.update(steps.freeze())
                save()
                saved = time.monotonic()
    except KeyboardInterrupt:
        steps.close()
        state.update(steps.freeze(last=True))
        save()
        raise
    finally:
        steps.close()
    state.update(steps.freeze(last=True))


class _Pass:
    """One pass: a session that gives the tensors of a plan, the observers, and the threads that feed them."""

    def __init__(
        self,
        model: ir.Model,
        steps: Plan,
        state: Mapping[str, TensorStatistics],
        channels: Mapping[str, int],
        workers: int,
        every_element: bool,
    ) -> None:
        self._plan = steps
        threads = max(1, usable_threads() // workers)
        self._model = InstrumentedModel(model, steps.fetched, keep_layout=channels, threads=threads)
        names = [*steps.inputs, *steps.fetched, *(d.name for d in steps.derived)]
        self._observers = {
            name: Observer(state[name], channels.get(name), every_element=every_element) for name in names
        }
        self._pool = ThreadPoolExecutor(workers)
        self._limit = workers + 1
        self._pending: set[Future[None]] = set()
        self._failure: EdgeqError | None = None

    def run(self, samples: Iterable[tuple[int, SampleLike]]) -> Iterator[None]:
        """Observe each sample, given with its place; gives one value for every sample that is done."""
        for place, sample in samples:
            self._pending.add(self._pool.submit(self._observe_or_fail, sample, place))
            while len(self._pending) >= self._limit:
                yield from self._finished(wait(self._pending, return_when=FIRST_COMPLETED).done)
        while self._pending:
            yield from self._finished(wait(self._pending, return_when=FIRST_COMPLETED).done)

    def drain(self) -> None:
        """Wait until no sample is half done."""
        for future in tuple(self._pending):
            future.result()

    def freeze(self, *, last: bool = False) -> dict[str, TensorStatistics]:
        """Statistics of the pass's tensors; only while no sample is half done. The `last` time frees the memory.

        Raises:
            EdgeqError: a sample failed.
        """
        if self._failure is not None:
            raise self._failure
        derived = {d.name: d for d in self._plan.derived}
        done = {name: t.freeze(last=last) for name, t in self._observers.items() if name not in derived}
        for name, how in derived.items():
            parts = [done[source].histogram for source in how.sources]
            histogram = parts[0]
            for part in parts[1:]:
                histogram = histogram.merge(part)
            if how.kind == "clip":
                histogram = histogram.clip(how.low, how.high)
            done[name] = self._observers[name].freeze(histogram)
        return done

    def close(self) -> None:
        """Finish the samples that are running and forget those that are not: what was observed is the first n."""
        self._pool.shutdown(cancel_futures=True)

    def _finished(self, done: set[Future[None]]) -> Iterator[None]:
        for future in done:
            self._pending.discard(future)
            future.result()
            yield None

    def _observe_or_fail(self, sample: SampleLike, place: int) -> None:
        try:
            self._observe(sample, place)
        except EdgeqError as error:
            self._failure = error
            raise

    def _observe(self, sample: SampleLike, place: int) -> None:
        seen: dict[str, tuple[Seen, str]] = {}
        for name, values in self._arrays(sample):
            try:
                seen[name] = (self._observers[name].observe(values, place), dtype_name(values))
            except CalibrationError as error:
                raise CalibrationError(
                    f"tensor {name!r} in sample {sample.name}: {error.problem}",
                    error.fix or "Check the sample and its preprocessing, or leave the tensor out",
                ) from error
        for derived in self._plan.derived:
            part = _derive(derived, [seen[source][0] for source in derived.sources])
            dtype = seen[derived.sources[0]][1]
            seen[derived.name] = (part, dtype)
            self._observers[derived.name].note(part, dtype)

    def _arrays(self, sample: SampleLike) -> Iterator[tuple[str, NDArray[Any]]]:
        for name in self._plan.inputs:
            if name not in sample.inputs:
                raise DataError(f"sample {sample.name} has no input {name!r}", "Give all inputs of the model")
            yield name, sample.inputs[name]
        if not self._plan.fetched:
            return
        values = self._model.run(sample.inputs, sample.name)
        while values:
            # Popped, so that each array is freed as soon as it is counted.
            yield self._plan.fetched[len(self._plan.fetched) - len(values)], values.pop(0)


def _derive(how: Derived, sources: list[Seen]) -> Seen:
    count = sum(s.count for s in sources)
    low, high = min(s.minimum for s in sources), max(s.maximum for s in sources)
    if how.kind == "clip" and count:
        low, high = (min(max(v, how.low), how.high) + 0.0 for v in (low, high))
    return Seen(count, low, high)


def _initial(
    start: Statistics | None, model_digest: str, data_digest: str, names: Sequence[str], total: int
) -> dict[str, TensorStatistics]:
    if start is None:
        return {name: TensorStatistics() for name in names}
    start.check_model(model_digest, "the unfinished calibration")
    if start.data_digest != data_digest or start.total != total:
        raise CalibrationError(
            "the unfinished calibration was collected on other data", "Give the same data, or start anew with --force"
        )
    if set(start.tensors) != set(names):
        raise CalibrationError(
            "the unfinished calibration recorded other tensors", "Give the same options, or start anew with --force"
        )
    return dict(start.tensors)


def _known_floats(model: ir.Model, names: Sequence[str]) -> tuple[str, ...]:
    """`names` without the tensors that are no floats after all, which only ONNX Runtime may know."""
    index = GraphIndex(model)
    for name in names:
        if name not in index.values or index.values[name].is_initializer():
            raise CalibrationError(f"the model has no tensor {name!r}", "`edgeq inspect` lists the tensors")
    typed = element_types(model)
    untyped = [n for n in names if n not in index.inputs and n not in typed]
    if not untyped:
        return tuple(names)
    floats = InstrumentedModel(model, untyped, keep_layout=untyped, threads=1).floats()
    return tuple(n for n in names if n not in untyped or n in floats)
