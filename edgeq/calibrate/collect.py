"""One float32 pass of a model over samples: what every tensor held, in memory that does not grow with the samples."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgeq.calibrate.float_pass import FloatOutputs, FloatPass
from edgeq.calibrate.histogram import EMPTY, Counter
from edgeq.calibrate.instrumented import InstrumentedModel
from edgeq.calibrate.observer import ReducedModel
from edgeq.calibrate.statistics import Statistics, TensorStatistics
from edgeq.calibrate.tensors import Plan, plan, quantizable_tensors
from edgeq.data.samples import Samples, SourceSamples
from edgeq.data.shards import Shard, Sharded
from edgeq.distributed.workers import Files, Workers, files_for
from edgeq.errors import CalibrationError, DataError
from edgeq.hardware.detect import usable_threads
from edgeq.model.graph import GraphIndex
from edgeq.model.load import model_files, partitions, read_model, save_model, tensor_sizes
from edgeq.model.shapes import element_types
from edgeq.model.tensors import float_constant
from edgeq.util.display import SILENT, Progress


@dataclass(frozen=True)
class CalibrationJob:
    """What a worker does: the statistics of `names` over a shard."""

    model: Files
    samples: SourceSamples | None
    names: tuple[str, ...]
    channels: Mapping[str, int]
    threads: int
    every_element: bool

    def open(self, stack: ExitStack) -> Callable[[Shard], dict[str, TensorStatistics]]:
        """See `edgeq.distributed.processes.Job`."""
        model = read_model(self.model.place(stack))
        steps = plan(model, self.names, self.channels)
        instrumented = InstrumentedModel(model, steps.fetched, keep_layout=self.channels, threads=self.threads)
        fetched = ReducedModel(instrumented, every_element=self.every_element)
        nothing = {name: TensorStatistics() for name in self.names}

        def run(shard: Shard) -> dict[str, TensorStatistics]:
            seen = FloatPass(fetched, steps, nothing, self.channels, at_once=1, every_element=self.every_element)
            for place, sample in enumerate(shard.read(self.samples), shard.start):
                seen.observe(sample, place)
            return seen.freeze(last=True, derive=False)

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
    first: int,
) -> Iterator[dict[str, TensorStatistics]]:
    """The statistics of each shard from sample `first` on, in order, without the histograms that follow from others."""
    with tempfile.TemporaryDirectory(prefix="edgeq-calibrate-") as folder:
        path = Path(folder) / "model.onnx"
        save_model(model, path)
        files = files_for(workers, path, model_files(path)[1:])
        job = CalibrationJob(files, samples.reference, names, channels, threads, every_element)
        yield from workers.map(job, samples.shards(first))


class Merged:
    """The statistics of shards, merged as they come: histograms are counted in tables and, where they follow from
    others, made once at the end.

    Args:
        steps: the plan of the tensors.
        state: what was seen of each before.
    """

    def __init__(self, steps: Plan, state: Mapping[str, TensorStatistics]) -> None:
        self._plan = steps
        self._totals = {name: replace(state[name], histogram=EMPTY) for name in steps.names}
        self._counters = {name: Counter(state[name].histogram) for name in steps.counted}
        self._whole = True

    def run(self, parts: Iterable[Mapping[str, TensorStatistics]]) -> Iterator[int]:
        """Add one shard after another; gives the number of samples of each."""
        for part in parts:
            self.add(part)
            yield next(iter(part.values())).samples

    def add(self, part: Mapping[str, TensorStatistics]) -> None:
        """The statistics of one shard, without the histograms that follow from others."""
        self._whole = False
        for name, new in part.items():
            before, totals = self._totals[name], replace(new, histogram=EMPTY)
            self._totals[name] = before.merge(totals) if before.samples else totals
        for name, counter in self._counters.items():
            counter.take(part[name].histogram)
        self._whole = True

    def so_far(self) -> dict[str, TensorStatistics]:
        """The statistics of the shards that were added."""
        totals = self._totals
        counted = {name: c.freeze(totals[name].minimum, totals[name].maximum) for name, c in self._counters.items()}
        known = self._plan.histograms(counted, {name: one.nonfinite for name, one in totals.items()})
        return {name: replace(one, histogram=known[name]) for name, one in totals.items()}

    def end(self) -> dict[str, TensorStatistics]:
        """The same; nothing where an interrupt has left a shard half added: what was saved last stays."""
        return self.so_far() if self._whole else {}


MOST_AT_ONCE = 4
"""More samples at once than this gain nothing: counting takes turns."""


Checkpoint = Callable[[Statistics], None]


def collect(
    model: ir.Model,
    samples: Samples,
    tensors: Sequence[str] | None = None,
    *,
    model_digest: str = "",
    memory: int | None = None,
    progress: Progress = SILENT,
    channels: Mapping[str, int] | None = None,
    threads: int = 0,
    workers: Workers | None = None,
    every_element: bool = False,
    start: Statistics | None = None,
    checkpoint: Checkpoint | None = None,
    checkpoint_seconds: float = 30.0,
    timed: Callable[[float, float], None] = lambda running, counting: None,
    outputs: FloatOutputs | None = None,
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
        threads: to compute with, several samples at a time; 0: one for each core.
        workers: that the samples are shared among; the result has the same bytes for any number of them. Each shard
            is computed with `threads`, or with one.
        every_element: count all elements of large tensors too, see `edgeq.calibrate.observer.PLENTY`.
        start: unfinished statistics of the same model, data and tensors to continue.
        checkpoint: called with the statistics so far, now and then and when interrupted (Ctrl-C).
        timed: called after each pass on this machine with the seconds that its threads ran the model and that they
            counted what it gave.
        outputs: takes the model's outputs, where one pass on this machine sees all samples.

    Raises:
        CalibrationError: a value is NaN or infinite (names tensor and sample), or `start` belongs to something else.
        DataError: there are no samples, or ONNX Runtime refuses one.
    """
    total = len(samples)
    if total == 0:
        raise DataError("there are no samples to calibrate with", "Give at least one")
    channels = dict(channels or {})
    types = element_types(model)
    names = _known_floats(model, tuple(tensors) if tensors is not None else quantizable_tensors(model, types), types)
    data_digest = samples.digest()
    state = _initial(start, model_digest, data_digest, names, total)
    threads = threads or (1 if workers is not None else usable_threads())
    at_once = 1 if workers is not None else min(MOST_AT_ONCE, threads)
    passes, at_once = _passes(model, names, state, samples, total, memory, at_once)
    kept = outputs if outputs is not None and outputs.names and workers is None and len(passes) == 1 else None

    def snapshot() -> Statistics:
        """The statistics as they are now; samples that every tensor has been through count as done."""
        done = min((t.samples for t in state.values()), default=total)
        return Statistics(model_digest, data_digest, done, state, total)

    def save() -> None:
        """Hand the statistics so far to `checkpoint`."""
        if checkpoint is not None:
            checkpoint(snapshot())

    sharded = Sharded(samples, workers) if workers is not None else None
    with progress.stage(f"calibrating {len(names)} tensors", total * len(passes)) as advance, _weights_named(model):
        for partition in passes:
            done = state[partition[0]].samples
            advance(done)
            steps = plan(model, partition, channels)
            if workers is not None and sharded is not None:
                parts = observe_on(
                    workers,
                    model,
                    sharded,
                    partition,
                    channels,
                    threads=threads,
                    every_element=every_element,
                    first=done,
                )
                merged = Merged(steps, state)
                _collect(merged.run(parts), merged, state, advance, save, checkpoint_seconds)
                continue
            each = max(1, threads // at_once)
            last = kept.names if kept is not None else ()
            wanted = tuple(dict.fromkeys((*steps.fetched, *last)))
            instrumented = InstrumentedModel(model, wanted, keep_layout={*channels, *last}, threads=each)
            fetched = ReducedModel(instrumented, every_element=every_element)
            seen = FloatPass(
                fetched, steps, state, channels, at_once=at_once, every_element=every_element, outputs=kept
            )
            remaining = itertools.islice(enumerate(samples), done, None)
            with closing(seen):
                _collect(seen.run(remaining), seen, state, advance, save, checkpoint_seconds)
            timed(seen.running_s, seen.counting_s)
    return snapshot()


@contextmanager
def _weights_named(model: ir.Model) -> Iterator[None]:
    """Name the weight that holds NaN if a tensor does: no sample is the cause then. Infinite ones may be masks."""
    try:
        yield
    except CalibrationError as error:
        for weight in model.graph.initializers.values():
            values = float_constant(weight)
            if values is not None and np.isnan(values).any():
                problem = f"{error.problem}, as weight {weight.name!r} of the model does"
                raise CalibrationError(problem, "Train or export the model again") from error
        raise


def _passes(
    model: ir.Model,
    names: Sequence[str],
    state: Mapping[str, TensorStatistics],
    samples: Samples,
    total: int,
    memory: int | None,
    at_once: int,
) -> tuple[list[tuple[str, ...]], int]:
    """Partitions of the tensor names, one a pass, and how many samples may run at once.

    Tensors of one pass are neighbours in the graph and have seen the same number of samples; those that have seen all
    are in none. Fewer samples at once come before more passes, because each pass runs the model again. Sizes are those
    of the first sample.
    """
    by_progress: dict[int, list[str]] = {}
    for name in names:
        if state[name].samples < total:
            by_progress.setdefault(state[name].samples, []).append(name)
    groups = list(by_progress.values())
    if memory is None:
        return [tuple(group) for group in groups], at_once
    first = next(iter(samples), None)
    if first is None:
        raise DataError("there are no samples to calibrate with", "Give at least one")
    sizes = tensor_sizes(model, first.inputs)
    largest = max(sizes.values(), default=0)
    sizes = {name: sizes.get(name, largest) for name in names}
    # One sample more waits to be counted while as many as run at once do.
    at_once = max(1, min(at_once, memory // max(1, sum(sizes.values())) - 1))
    budget = memory // (at_once + 1 if at_once > 1 else 1)
    parts = (part for group in groups for part in partitions(((name, sizes[name]) for name in group), budget))
    return [tuple(part) for part in parts], at_once


def _collect(
    seen: Iterable[int],
    statistics: FloatPass | Merged,
    state: dict[str, TensorStatistics],
    advance: Callable[[int], None],
    save: Callable[[], None],
    save_seconds: float,
) -> None:
    """Go through a pass, which gives how many samples more it has seen, and put their statistics into `state`: now and
    then, when it is interrupted, and at its end."""
    saved = time.monotonic()
    try:
        for count in seen:
            advance(count)
            if time.monotonic() - saved > save_seconds:
                state.update(statistics.so_far())
                save()
                saved = time.monotonic()
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
            "the unfinished calibration was collected on other data", "Give the same data, or start anew with --force"
        )
    if set(start.tensors) != set(names):
        raise CalibrationError(
            "the unfinished calibration recorded other tensors", "Give the same options, or start anew with --force"
        )
    return dict(start.tensors)


def _known_floats(model: ir.Model, names: Sequence[str], types: Mapping[str, ir.DataType]) -> tuple[str, ...]:
    """`names` without the tensors that are no floats after all, which only ONNX Runtime may know."""
    index = GraphIndex(model)
    for name in names:
        if name not in index.values or index.values[name].is_initializer():
            raise CalibrationError(f"the model has no tensor {name!r}", "`edgeq inspect` lists the tensors")
    untyped = [n for n in names if n not in index.inputs and n not in types]
    if not untyped:
        return tuple(names)
    floats = InstrumentedModel(model, untyped, keep_layout=untyped, threads=1).floats()
    return tuple(n for n in names if n not in untyped or n in floats)
