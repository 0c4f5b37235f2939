"""The float pass in shards, on workers: each gives the statistics of its samples, which merge to the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from edgeq.calibrate.float_pass import FloatPass
from edgeq.calibrate.histogram import EMPTY, Counter
from edgeq.calibrate.instrumented import InstrumentedModel
from edgeq.calibrate.reduced import ReducedModel
from edgeq.calibrate.statistics import TensorStatistics
from edgeq.calibrate.tensors import Plan, plan
from edgeq.data.samples import SourceSamples
from edgeq.data.shards import Shard, Sharded
from edgeq.distributed.files import Files, files_for
from edgeq.distributed.workers import Workers
from edgeq.model.load import model_files, read_model, save_model


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
        """See `edgeq.distributed.job.Job`."""
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
