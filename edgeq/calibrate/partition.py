"""Splitting the tensors of a model into passes that fit a memory budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from edgeq.calibrate.statistics import TensorStatistics
from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.model.sizes import partitions, tensor_sizes


def partition_tensors(
    model: ir.Model,
    names: Sequence[str],
    state: Mapping[str, TensorStatistics],
    samples: Iterable[Sample],
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
    at_once = max(1, min(at_once, memory // max(1, sum(sizes.values()))))
    budget = memory // at_once
    parts = [part for group in groups for part in partitions(((name, sizes[name]) for name in group), budget)]
    return [tuple(part) for part in parts], at_once
