"""Run a float32 model once over samples and count the values of every tensor. The memory that this needs does not
depend on the number of samples.

For each sample, a session returns the tensors, and observers count their values (`FloatPass`). `FloatOutputs` keeps the
model's outputs on the calibration samples. If the proof uses the same samples, it compares the int8 model with these
outputs and need not run the float model again.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from edgeq_device.measure.basis import NO_PADDING, Padding
from edgeq_device.measure.pairs import find_visible
from edgeq_device.system.places import scratch_folder
from numpy.typing import NDArray

from edgeq.calibration.instrumented import InstrumentedModel
from edgeq.calibration.observer import Observer, Part, Tally
from edgeq.calibration.plan import DerivedTensor, StatisticsPlan, plan_statistics, quantizable_tensors
from edgeq.calibration.statistics import EMPTY, FINITE, Counter, Statistics, TensorStatistics
from edgeq.data.sample import Sample
from edgeq.data.samples import Samples, Shard, Sharded, SourceSamples
from edgeq.distributed.workers import Files, Workers, share_files
from edgeq.errors import CalibrationError, DataError, EdgeqError
from edgeq.hardware.detect import count_threads
from edgeq.model.files import model_files
from edgeq.model.graph import GraphIndex, indexed, name_of
from edgeq.model.load import read_model, save_model
from edgeq.model.memory import partitions, tensor_sizes
from edgeq.model.padding import find_padding
from edgeq.model.parameters import float_constant
from edgeq.model.sessions import Loadable
from edgeq.model.shapes import element_types
from edgeq.util.display import SILENT, Progress

# Outputs of the float model that fit here (64 MiB) save the proof another run of the float model.
_MAX_STORED_BYTES = 2**26
# Bytes of an element of the widest type (float64, int64), because the types of outputs may not be known.
_LARGEST_ELEMENT = 8


class FloatOutputs:
    """Store the outputs of each sample. Several threads may store outputs at once.

    Args:
        model: the float model.
        total: number of samples.

    Attributes:
        names: names of the outputs. Empty if the outputs cannot be stored: they are too large, their sizes depend on
            the sample, or no node computes them.
    """

    def __init__(self, model: ir.Model, total: int) -> None:
        outputs = model.graph.outputs
        fits = total * sum(map(_bound_bytes, outputs)) <= _MAX_STORED_BYTES
        self.names = tuple(map(name_of, outputs)) if fits else ()
        self._total = total
        self._by_place: dict[int, Mapping[str, NDArray[Any]]] = {}

    def keep(self, place: int, values: Mapping[str, Any]) -> None:
        """Store the outputs of the sample at index `place`. `values` contains the fetched tensors of this sample."""
        self._by_place[place] = {name: values[name] for name in self.names}

    def all(self) -> Sequence[Mapping[str, NDArray[Any]]]:
        """Return the outputs of each sample, in order, as name → array. Return an empty sequence if any are missing."""
        if not self.names or len(self._by_place) < self._total:
            return ()
        return tuple(self._by_place[place] for place in range(self._total))


def _bound_bytes(output: ir.Value) -> float:
    """Return an upper bound of an output's size for one sample, in bytes. Return infinity if the size is not known, or
    if an axis other than the first is free.
    """
    if output.producer() is None or output.shape is None:
        return math.inf
    sizes = [size for size in output.shape if isinstance(size, int)]
    free = len(output.shape) - len(sizes)
    first_alone = free == 0 or (free == 1 and not isinstance(output.shape[0], int))
    return math.prod(sizes) * _LARGEST_ELEMENT if first_alone else math.inf


_Arrays = list[tuple[str, NDArray[Any] | Part]]


class FloatPass:
    """Run one pass over the samples with several threads, and count the values of the tensors.

    Args:
        model: model that runs the samples and returns the fetched tensors of `steps`.
        steps: plan that lists the tensors to fetch and to derive.
        state: earlier statistics by tensor name.
        channels: channel axes by tensor name.
        at_once: number of samples that run at the same time.
        every_element: whether to count all elements of large tensors.
        outputs: store for the model's outputs. If it is set, `model` returns the fetched tensors, followed by the
            outputs that are not among them.
        padding: the positions that masks hide. Their values do not count.

    Attributes:
        running_s: seconds spent on running the model, summed over all threads.
        counting_s: seconds spent on counting, summed over all threads.
    """

    def __init__(
        self,
        model: InstrumentedModel,
        steps: StatisticsPlan,
        state: Mapping[str, TensorStatistics],
        channels: Mapping[str, int],
        *,
        at_once: int,
        every_element: bool,
        outputs: FloatOutputs | None = None,
        padding: Padding = NO_PADDING,
    ) -> None:
        self._outputs = outputs
        self._padding = padding
        self._plan = steps
        self._model = model
        self._observers = {
            name: Observer(state[name], channels.get(name), every_element=every_element) for name in steps.names
        }
        self._pool = ThreadPoolExecutor(at_once)
        # One more sample than can run waits in the pool, so that no thread is idle while another sample is read.
        self._limit = at_once + 1
        self._pending: set[Future[None]] = set()
        self._failure: EdgeqError | None = None
        self._timing, self._counting = threading.Lock(), threading.Lock()
        self._uncounted: deque[tuple[Sample, int, _Arrays]] = deque()
        self.running_s = self.counting_s = 0.0

    def run(self, samples: Iterable[tuple[int, Sample]]) -> Iterator[int]:
        """Observe the samples, given as pairs (index, sample). Yield 1 for each sample that is done."""
        for place, sample in samples:
            self._pending.add(self._pool.submit(self.observe, sample, place))
            while len(self._pending) >= self._limit:
                yield from self._await(wait(self._pending, return_when=FIRST_COMPLETED).done)
        while self._pending:
            yield from self._await(wait(self._pending, return_when=FIRST_COMPLETED).done)

    def so_far(self) -> dict[str, TensorStatistics]:
        """Finish the samples that are running, and return statistics of all samples so far.

        Raises:
            EdgeqError: a sample failed.
        """
        for future in tuple(self._pending):
            future.result()
        return self.freeze()

    def end(self) -> dict[str, TensorStatistics]:
        """Finish the samples that are running, drop the waiting samples, and return the statistics.

        Raises:
            EdgeqError: a sample failed.
        """
        self.close()
        return self.freeze(release=True)

    def freeze(self, *, release: bool = False, derive: bool = True) -> dict[str, TensorStatistics]:
        """Return statistics of the tensors of this pass. Do not call it while a sample is running.

        Args:
            release: whether to free the memory of the counters.
            derive: whether to derive histograms from the histograms of other tensors. If not, derived histograms are
                empty.

        Raises:
            EdgeqError: a sample failed.
        """
        if self._failure is not None:
            raise self._failure
        statistics = {name: self._observers[name].freeze(release=release) for name in self._plan.counted_names}
        nonfinite = {name: observer.nonfinite for name, observer in self._observers.items()}
        histograms = (
            self._plan.histograms({n: tensor.histogram for n, tensor in statistics.items()}, nonfinite)
            if derive
            else {}
        )
        for derived in self._plan.derived:
            statistics[derived.name] = self._observers[derived.name].freeze(histograms.get(derived.name, EMPTY))
        return statistics

    def close(self) -> None:
        """Finish the samples that are running and drop the waiting samples. The observed samples are then the first n
        samples, without a gap.
        """
        # Running samples are finished, because a sample that is counted in some tensors only would leave a gap.
        self._pool.shutdown(cancel_futures=True)

    def _await(self, futures: set[Future[None]]) -> Iterator[int]:
        for future in futures:
            self._pending.discard(future)
            future.result()
            yield 1

    def observe(self, sample: Sample, place: int) -> None:
        """Run and count one sample. `place` is its index among all samples.

        Raises:
            CalibrationError: an input contains a value that is not finite, or an output contains NaN or has no finite
                value.
            DataError: ONNX Runtime refuses the sample.
        """
        try:
            self._observe(sample, place)
        # The failure is kept: statistics of the samples around it would look complete.
        except EdgeqError as error:
            self._failure = error
            raise

    def _observe(self, sample: Sample, place: int) -> None:
        began = time.perf_counter()
        arrays = self._arrays(sample, place)
        with self._timing:
            self.running_s += time.perf_counter() - began
        # Only one thread counts at a time, while the others run the next samples. Two counting threads would hand
        # Python's global lock back and forth at every array, which takes longer than counting.
        self._uncounted.append((sample, place, arrays))
        while self._uncounted and self._counting.acquire(blocking=len(self._uncounted) > 1):
            began = time.perf_counter()
            try:
                while self._uncounted:
                    self._count(*self._uncounted.popleft())
            finally:
                self.counting_s += time.perf_counter() - began
                self._counting.release()

    def _count(self, sample: Sample, place: int, arrays: _Arrays) -> None:
        tallies: dict[str, Tally] = {}
        while arrays:
            # Pop the arrays, so that each is freed as soon as it is counted.
            name, values = arrays.pop()
            try:
                visible = None
                if self._padding.masks and not isinstance(values, Part):
                    visible = find_visible(self._padding, name, values.shape, sample.inputs)
                tallies[name] = self._observers[name].observe(values, place, visible=visible)
            except CalibrationError as error:
                raise CalibrationError(
                    f"tensor {name!r} in sample {sample.name}: {error.problem}",
                    error.fix or "Check the sample and its preprocessing, or leave the tensor out",
                ) from error
        for derived in self._plan.derived:
            part = _derive(derived, [tallies[source] for source in derived.sources])
            tallies[derived.name] = part
            self._observers[derived.name].note(part)
        # Inputs must be finite, because a NaN of the sample would appear in nearly every tensor after it.
        for name in self._plan.inputs:
            if tallies[name].nonfinite:
                raise _refusal(name, sample, tallies[name])
        # An output may contain infinities, such as masked scores, but must have some finite value to get a range.
        for name in self._plan.outputs:
            if tallies[name].nonfinite.nan or (tallies[name].nonfinite and not tallies[name].count):
                raise _refusal(name, sample, tallies[name])

    def _arrays(self, sample: Sample, place: int) -> _Arrays:
        """Return the arrays to count for a sample, each with its tensor name. The order is reversed, because the arrays
        are popped from the end.
        """
        for name in self._plan.inputs:
            if name not in sample.inputs:
                raise DataError(f"sample {sample.name} has no input {name!r}", "Give all inputs of the model")
        arrays: _Arrays = [(name, sample.inputs[name]) for name in self._plan.inputs]
        if self._plan.fetched:
            values = self._model.observe(sample.inputs, sample.name, place)
            arrays += zip(self._plan.fetched, values, strict=self._outputs is None)
            if self._outputs is not None:
                self._outputs.keep(place, dict(zip(self._model.names, values, strict=True)))
        # The arrays are popped from the end, which frees each as soon as it is counted.
        return arrays[::-1]


def _refusal(name: str, sample: Sample, tally: Tally) -> CalibrationError:
    return CalibrationError(
        f"tensor {name!r} in sample {sample.name}: it contains {tally.nonfinite}",
        "Check the sample and its preprocessing",
    )


def _derive(derived: DerivedTensor, sources: list[Tally]) -> Tally:
    count = sum(s.count for s in sources)
    low, high = min(s.minimum for s in sources), max(s.maximum for s in sources)
    nonfinite = sum((s.nonfinite for s in sources), start=FINITE)
    # A clip turns infinities into its bounds, which then count as ordinary values.
    if derived.kind == "clip":
        moved, nonfinite = derived.clipped(nonfinite)
        count += sum(number for number, _ in moved)
        low, high = min((low, *(bound for _, bound in moved))), max((high, *(bound for _, bound in moved)))
        if count:
            low, high = (min(max(v, derived.low), derived.high) + 0.0 for v in (low, high))
    return Tally(count, low, high, sources[0].dtype, nonfinite)


@dataclass(frozen=True)
class CalibrationJob:
    """Compute, in a worker process, the statistics of the tensors `names` over a shard."""

    model: Files
    samples: SourceSamples | None
    names: tuple[str, ...]
    channels: Mapping[str, int]
    threads: int
    every_element: bool

    def open(self, stack: ExitStack) -> Callable[[Shard], dict[str, TensorStatistics]]:
        """Return the function that computes the statistics of a shard. See `edgeq.distributed.workers.WorkerJob`."""
        # A worker gets the model as a file once, and prepares its session once for all of its shards.
        model = read_model(self.model.place(stack))
        graph = GraphIndex(model)
        steps, padding = plan_statistics(model, self.names, self.channels), find_padding(graph)
        every = self.every_element
        fetched = InstrumentedModel(
            graph,
            steps.fetched,
            keep_layout=steps.fetched if padding.masks else self.channels,
            threads=self.threads,
            every_element=every or bool(padding.masks),
        )
        nothing = {name: TensorStatistics() for name in self.names}

        def run(shard: Shard) -> dict[str, TensorStatistics]:
            float_pass = FloatPass(
                fetched, steps, nothing, self.channels, at_once=1, every_element=every, padding=padding
            )
            for place, sample in enumerate(shard.read_samples(self.samples), shard.start):
                float_pass.observe(sample, place)
            return float_pass.freeze(release=True, derive=False)

        return run


def observe_on(
    workers: Workers,
    model: ir.Model,
    samples: Sharded,
    names: tuple[str, ...],
    channels: Mapping[str, int],
    *,
    threads: int,
    every_element: bool,
    start: int,
) -> Iterator[dict[str, TensorStatistics]]:
    """Yield the statistics of each shard, in order, beginning with sample `start`. Histograms that can be derived are
    left empty.
    """
    with scratch_folder("edgeq-calibrate-") as folder:
        path = Path(folder) / "model.onnx"
        save_model(model, path)
        files = share_files(workers, path, model_files(path)[1:])
        job = CalibrationJob(files, samples.reference, names, channels, threads, every_element)
        yield from workers.map(job, samples.shards(start))


class ShardMerger:
    """Merge the statistics of shards as they arrive. Histogram counts are summed in tables, and derived histograms are
    computed once, at the end.

    Args:
        steps: plan that lists the tensors to fetch and to derive.
        state: earlier statistics by tensor name.
    """

    def __init__(self, steps: StatisticsPlan, state: Mapping[str, TensorStatistics]) -> None:
        self._plan = steps
        self._totals = {name: replace(state[name], histogram=EMPTY) for name in steps.names}
        self._counters = {name: Counter(state[name].histogram) for name in steps.counted_names}
        # An interrupt in the middle of `add` would leave some tensors with the shard and others without it.
        self._whole = True

    def run(self, parts: Iterable[Mapping[str, TensorStatistics]]) -> Iterator[int]:
        """Add the shards one by one, and yield the number of samples in each."""
        for part in parts:
            self.add(part)
            yield next(iter(part.values())).samples

    def add(self, part: Mapping[str, TensorStatistics]) -> None:
        """Add the statistics of one shard. Its derived histograms are not used."""
        self._whole = False
        for name, new in part.items():
            total, addition = self._totals[name], replace(new, histogram=EMPTY)
            self._totals[name] = total.merge(addition) if total.samples else addition
        for name, counter in self._counters.items():
            counter.take(part[name].histogram)
        self._whole = True

    def so_far(self) -> dict[str, TensorStatistics]:
        """Return the statistics of all shards added so far."""
        totals = self._totals
        counted_histograms = {
            name: c.freeze(totals[name].minimum, totals[name].maximum) for name, c in self._counters.items()
        }
        histograms = self._plan.histograms(
            counted_histograms, {name: tensor.nonfinite for name, tensor in totals.items()}
        )
        return {name: replace(tensor, histogram=histograms[name]) for name, tensor in totals.items()}

    def end(self) -> dict[str, TensorStatistics]:
        """Return the statistics of all shards. Return {} if an interrupt left a shard half added; the caller then keeps
        the last saved state.
        """
        return self.so_far() if self._whole else {}


MAX_CONCURRENT = 4
"""Largest number of samples that run at once. A larger number is not faster, because only one sample is counted at a
time."""


@dataclass(frozen=True)
class PassLimits:
    """Limit the resources of a pass.

    Attributes:
        memory: limit in bytes for observed activations; None for no limit. If a model needs more, edgeq makes several
            passes. Each pass runs all samples and records some of the tensors.
        threads: number of threads, shared by all samples that run at a time; 0 for one thread per core.
        every_element: whether to count all elements of large tensors; see `edgeq.calibration.observer.PLENTY`.
    """

    memory: int | None = None
    threads: int = 0
    every_element: bool = False


NO_LIMITS = PassLimits()


@dataclass(frozen=True)
class Checkpoints:
    """Continue an earlier pass, and save the statistics of this one from time to time.

    Attributes:
        start: unfinished statistics to continue, from the same model, data and tensors.
        save: function that is called with the statistics so far, at intervals and on an interrupt (Ctrl-C).
        seconds: the interval between two calls.
    """

    start: Statistics | None = None
    save: Callable[[Statistics], None] = lambda statistics: None
    seconds: float = 30.0


NO_CHECKPOINTS = Checkpoints()


def collect(
    model: ir.Model | GraphIndex,
    samples: Samples,
    tensors: Sequence[str] | None = None,
    *,
    model_digest: str = "",
    limits: PassLimits = NO_LIMITS,
    progress: Progress = SILENT,
    channels: Mapping[str, int] | None = None,
    workers: Workers | None = None,
    checkpoints: Checkpoints = NO_CHECKPOINTS,
    timed: Callable[[float, float], None] = lambda running, counting: None,
    outputs: FloatOutputs | None = None,
) -> Statistics:
    """Run the float model once over the samples, and record the extrema, the number of elements and a histogram of each
    tensor.

    Several samples run at a time, each on few threads. All totals are integers or extrema, so the result does not
    depend on the order in which samples finish.

    Args:
        model: a valid float model, possibly with external data; it is not changed.
        samples: samples; each runs once, in this order.
        tensors: names of the tensors to record; None means `quantizable_tensors`.
        model_digest: digest of the model's file, which is stored to identify the statistics later; "" if they are not
            saved.
        limits: limits on memory and threads.
        channels: channel axis by tensor name, for tensors that also need extrema per channel.
        workers: workers that share the samples; the result has the same bytes for any number of workers. Each shard
            runs on `limits.threads` threads, or on one thread if that is 0.
        checkpoints: unfinished statistics to continue, and where to save statistics.
        timed: function that is called after each pass on this machine with two numbers: the seconds spent on running
            the model and on counting, each summed over the threads.
        outputs: store for the model's outputs. It is filled only if a single pass on this machine sees all samples.

    Raises:
        CalibrationError: a value is NaN or infinite (the message names the tensor and the sample), or the statistics to
            continue come from another model, other data or other tensors.
        DataError: there are no samples, or ONNX Runtime refuses one.
    """
    total = len(samples)
    if total == 0:
        raise DataError("there are no samples to calibrate with", "Give at least one")
    channels = dict(channels or {})
    graph = indexed(model)
    model = graph.model
    names = _float_names(graph, tuple(tensors) if tensors is not None else quantizable_tensors(graph))
    data_digest = samples.digest()
    state = _initial(checkpoints.start, model_digest, data_digest, names, total)
    # Several workers may share a machine, so each gets one thread unless the user says otherwise.
    threads = limits.threads or (1 if workers is not None else count_threads())
    at_once = 1 if workers is not None else min(MAX_CONCURRENT, threads)
    passes, at_once = _passes(graph, names, state, samples, total, limits.memory, at_once)
    # Several passes would store each output again, and workers would send all outputs back.
    output_store = outputs if outputs is not None and outputs.names and workers is None and len(passes) == 1 else None

    def snapshot() -> Statistics:
        """Return the current statistics. A sample counts as done once it has been counted for every tensor."""
        sample_count = min((t.samples for t in state.values()), default=total)
        return Statistics(model_digest, data_digest, sample_count, state, total)

    def save() -> None:
        checkpoints.save(snapshot())

    sharded = Sharded(samples, workers) if workers is not None else None
    padding = find_padding(graph)
    with progress.stage(f"calibrating {len(names)} tensors", total * len(passes)) as advance, _name_weights(model):
        for partition in passes:
            position = state[partition[0]].samples
            advance(position)
            steps = plan_statistics(model, partition, channels)
            # Workers return the statistics of whole shards, so there is nothing to fetch or count in this process.
            if workers is not None and sharded is not None:
                parts = observe_on(
                    workers,
                    model,
                    sharded,
                    partition,
                    channels,
                    threads=threads,
                    every_element=limits.every_element,
                    start=position,
                )
                merged = ShardMerger(steps, state)
                _collect(merged.run(parts), merged, state, advance, save, checkpoints.seconds)
                continue
            sample_threads = max(1, threads // at_once)
            output_names = output_store.names if output_store is not None else ()
            fetched_names = tuple(dict.fromkeys((*steps.fetched, *output_names)))
            # Positions can be told apart only in the whole tensor, in its own layout.
            layout_names = fetched_names if padding.masks else {*channels, *output_names}
            every = limits.every_element or bool(padding.masks)
            fetched = InstrumentedModel(
                graph, fetched_names, keep_layout=layout_names, threads=sample_threads, every_element=every
            )
            float_pass = FloatPass(
                fetched,
                steps,
                state,
                channels,
                at_once=at_once,
                every_element=limits.every_element,
                outputs=output_store,
                padding=padding,
            )
            remaining = itertools.islice(enumerate(samples), position, None)
            # The pool must end before the next pass begins, or both would hold their activations at once.
            with closing(float_pass):
                _collect(float_pass.run(remaining), float_pass, state, advance, save, checkpoints.seconds)
            timed(float_pass.running_s, float_pass.counting_s)
    return snapshot()


@contextmanager
def _name_weights(model: ir.Model) -> Iterator[None]:
    """If a tensor contains NaN because a weight contains NaN, name the weight in the error instead of blaming the
    sample. Infinite weights are not named, because they may be masks.
    """
    try:
        yield
    except CalibrationError as error:
        for weight in model.graph.initializers.values():
            values = float_constant(weight)
            if values is not None and np.isnan(values).any():
                problem = f"{error.problem}, like weight {weight.name!r} of the model"
                raise CalibrationError(problem, "Train or export the model again") from error
        raise


def _passes(
    graph: GraphIndex,
    names: Sequence[str],
    state: Mapping[str, TensorStatistics],
    samples: Samples,
    total: int,
    memory: int | None,
    at_once: int,
) -> tuple[list[tuple[str, ...]], int]:
    """Return the tensor names of each pass, and how many samples may run at once.

    The tensors of a pass are neighbours in the graph and have seen the same number of samples. Tensors that have seen
    all samples are left out. If memory is short, edgeq first runs fewer samples at once. It adds passes
    only if that is not enough, because each pass runs the model again. The sizes of the tensors are taken from the
    first sample.
    """
    by_progress: dict[int, list[str]] = {}
    for name in names:
        if state[name].samples < total:
            by_progress.setdefault(state[name].samples, []).append(name)
    groups = list(by_progress.values())
    # Without a limit, one pass sees all tensors, because each further pass runs the model again.
    if memory is None:
        return [tuple(group) for group in groups], at_once
    first_sample = next(iter(samples), None)
    if first_sample is None:
        raise DataError("there are no samples to calibrate with", "Give at least one")
    sizes = tensor_sizes(Loadable.of(graph).proto, first_sample.inputs)
    largest = max(sizes.values(), default=0)
    sizes = {name: sizes.get(name, largest) for name in names}
    # Besides the samples that run at once, one more waits to be counted.
    at_once = max(1, min(at_once, memory // max(1, sum(sizes.values())) - 1))
    budget = memory // (at_once + 1 if at_once > 1 else 1)
    parts = (part for group in groups for part in partitions(((name, sizes[name]) for name in group), budget))
    return [tuple(part) for part in parts], at_once


def _collect(
    counts: Iterable[int],
    statistics: FloatPass | ShardMerger,
    state: dict[str, TensorStatistics],
    advance: Callable[[int], None],
    save: Callable[[], None],
    save_seconds: float,
) -> None:
    """Run a pass and store its statistics in `state` every `save_seconds`, on an interrupt, and at the end. `counts`
    yields the number of samples processed since it last yielded.
    """
    saved = time.monotonic()
    try:
        for count in counts:
            advance(count)
            if time.monotonic() - saved > save_seconds:
                state.update(statistics.so_far())
                save()
                saved = time.monotonic()
    # What was counted so far is saved, so that a later run can go on from here.
    except KeyboardInterrupt:
        state.update(statistics.end())
        save()
        raise
    state.update(statistics.end())


def _initial(
    start: Statistics | None, model_digest: str, data_digest: str, names: Sequence[str], total: int
) -> dict[str, TensorStatistics]:
    if start is None:
        return {name: TensorStatistics() for name in names}
    start.check_model(model_digest, "the unfinished calibration")
    if start.data_digest != data_digest or start.total != total:
        raise CalibrationError(
            "the unfinished calibration was collected on other data",
            "Give the same data, or start anew with ⟨force=True⟩",
        )
    if set(start.tensors) != set(names):
        raise CalibrationError(
            "the unfinished calibration recorded other tensors",
            "Give the same options, or start anew with ⟨force=True⟩",
        )
    return dict(start.tensors)


def _float_names(graph: GraphIndex, names: Sequence[str]) -> tuple[str, ...]:
    """Return `names`, leaving out tensors that are not floats. Sometimes only ONNX Runtime can infer a type.

    Raises:
        CalibrationError: the model has no tensor with one of the names.
    """
    for name in names:
        if name not in graph.values or graph.values[name].is_initializer():
            raise CalibrationError(f"the model has no tensor {name!r}", "`edgeq inspect` lists the tensors")
    types = element_types(graph)
    # Opening a session takes long, so ONNX Runtime is asked only about types that onnx cannot infer.
    untyped = [n for n in names if n not in graph.inputs and n not in types]
    if not untyped:
        return tuple(names)
    floats = InstrumentedModel(graph, untyped, keep_layout=untyped, threads=1).floats()
    return tuple(n for n in names if n not in untyped or n in floats)
