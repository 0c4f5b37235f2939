"""The float pass in shards, on workers: each gives the statistics of its samples, which merge to the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from edgeq.calibrate.float_pass import FloatPass
from edgeq.calibrate.instrumented import InstrumentedModel
from edgeq.calibrate.reduced import ReducedModel
from edgeq.calibrate.statistics import TensorStatistics
from edgeq.calibrate.tensors import plan
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
            return seen.freeze(last=True)

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
    """The statistics of each shard from sample `first` on, in order."""
    with tempfile.TemporaryDirectory(prefix="edgeq-calibrate-") as folder:
        path = Path(folder) / "model.onnx"
        save_model(model, path)
        files = files_for(workers, path, model_files(path)[1:])
        job = CalibrationJob(files, samples.reference, names, channels, threads, every_element)
        yield from workers.map(job, samples.shards(first))


def merged(state: Mapping[str, TensorStatistics], part: Mapping[str, TensorStatistics]) -> dict[str, TensorStatistics]:
    """`part` with what was seen of its tensors before."""
    return {name: state[name].merge(new) if state[name].samples else new for name, new in part.items()}
