"""Derive the statistics of a rewritten model from those of the model before, without another pass over all tensors.

A rewriting that keeps what the model computes (split gates, equalized or smoothed channels) scales the channels of some
tensors and adds scaled copies of others. Every other tensor keeps its values, and so its statistics:

| tensor | statistics |
|---|---|
| scaled, or a scaled copy | extrema of each channel divided by its factor; a histogram of these and of drawn rows |
| new, or of unknown relation | a pass that observes only these tensors |
| any other | those of the tensor of the same name |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from edgeq.calibration.channel_values import ChannelValues
from edgeq.calibration.collect import collect
from edgeq.calibration.plan import quantizable_tensors
from edgeq.calibration.sampled_values import spread, tensor_values
from edgeq.calibration.statistics import (
    Float64s,
    Histogram,
    Statistics,
    TensorStatistics,
    histogram_of,
    in_units,
)
from edgeq.data.samples import Samples
from edgeq.model.graph import constant, name_of
from edgeq.model.prepare import PreparedModel
from edgeq.util.display import SILENT, Progress

# Samples on which tensors of two models are compared, and the largest difference of equal tensors, relative to the
# largest magnitude. Rewriting changes the order of float32 sums, and nothing else.
_COMPARED, _TOLERANCE = 4, 1e-3


@dataclass(frozen=True, eq=False)
class RescaledTensor:
    """Relate a tensor of a rewritten model to a tensor of the model before.

    Attributes:
        source: name of the tensor before.
        values: the values of that tensor.
        factor: what its channels are divided by, float64 [channels], all positive.
    """

    source: str
    values: ChannelValues
    factor: Float64s


def derive_statistics(
    statistics: Statistics,
    before: PreparedModel,
    after: PreparedModel,
    rescaled: Mapping[str, RescaledTensor] | None,
    samples: Samples,
    *,
    progress: Progress = SILENT,
) -> Statistics:
    """Return the statistics of the model `after`, which computes the same outputs as the model `before`.

    Args:
        statistics: statistics of the model before.
        rescaled: the tensors of the model after whose channels are scaled, by name. None if it is not known which
            tensors differ; tensors of the same name are then compared on some samples.
        samples: calibration samples, for the tensors whose relation is not known.

    Raises:
        CalibrationError: a tensor that is observed contains NaN, or no finite value.
        DataError: ONNX Runtime refuses a sample.
    """
    names = quantizable_tensors(after.graph)
    tensors = {name: statistics.tensors[name] for name in names if name in statistics.tensors}
    for name, relation in (rescaled or {}).items():
        tensors.pop(name, None)
        source = statistics.tensors.get(relation.source)
        # Extrema of channels do not show which elements are not finite.
        if name in names and source is not None and not source.nonfinite:
            tensors[name] = rescale_statistics(source, relation)
    if rescaled is None:
        for name in find_unlike(before, after, tuple(tensors), samples):
            del tensors[name]
    # A tensor of the model before that has no statistics is no float.
    untyped = before.graph.values.keys() - statistics.tensors.keys()
    missing = [name for name in names if name not in tensors and name not in untyped]
    if missing:
        observed = collect(after.graph, samples, missing, progress=progress)
        # A repair may use fewer samples than the calibration. The statistics still stand for all of them.
        tensors |= {n: replace(tensor, samples=statistics.samples) for n, tensor in observed.tensors.items()}
    return Statistics(after.digest, statistics.data_digest, statistics.samples, tensors, statistics.total)


def rescale_statistics(source: TensorStatistics, relation: RescaledTensor) -> TensorStatistics:
    """Return the statistics of a tensor with scaled channels. The extrema are exact. The histogram consists of the
    extrema of each sample and channel, which occur once, and of the other drawn values, which stand for all the rest.

    Args:
        source: statistics of the tensor before, without elements that are not finite.
    """
    if (relation.factor == 1).all() or not source.count:
        return source
    values = relation.values.over(relation.factor)
    # A mask may hide a sample as a whole.
    seen = np.isfinite(values.minima).all(1)
    minima, maxima = values.minima[seen], values.maxima[seen]
    ends, inner = histogram_of(np.concatenate([minima, maxima])), values.rows[~values.is_extreme]
    if values.rows.size >= source.count:
        histogram = histogram_of(values.rows)
    else:
        histogram = _stretch(histogram_of(inner), source.count - ends.total).merge(ends)
    return replace(
        source,
        minimum=float(minima.min()) + 0.0,
        maximum=float(maxima.max()) + 0.0,
        minimum_sum=_sum_over(minima.min(1), source.nonempty),
        maximum_sum=_sum_over(maxima.max(1), source.nonempty),
        histogram=histogram,
        channels=None,
    )


def _stretch(histogram: Histogram, total: int) -> Histogram:
    """Return a histogram of the same shape that counts `total` values."""
    # Rounding the running sum instead of each count keeps the total, and the quantiles to half a value.
    sums = np.rint(np.cumsum(histogram.counts) * (max(0, total) / max(1, histogram.total)))
    counts = np.diff(sums, prepend=0.0).astype(np.int64)
    return Histogram(histogram.keys[counts > 0], counts[counts > 0])


def _sum_over(numbers: np.ndarray, count: int) -> int:
    """Return `count` times the mean of float32 numbers, in units of 2^-149."""
    return sum(map(in_units, numbers.tolist())) * count // len(numbers)


def find_unlike(before: PreparedModel, after: PreparedModel, names: Sequence[str], samples: Samples) -> tuple[str, ...]:
    """Return the tensors among `names` that have other values in one model than in the other.

    Tensors are compared on some samples. There, channels may be zero that are not zero in others. So the result of a
    node whose constants are the same in both models, such as a Relu, is also unlike if an input of the node is.
    """
    equal = dict.fromkeys(names, True)
    runs = (tensor_values(model, names, spread(samples, _COMPARED)) for model in (before, after))
    for old, new in zip(*runs, strict=True):
        for name in names:
            tolerance = _TOLERANCE * float(np.abs(old[name][np.isfinite(old[name])]).max(initial=0.0))
            equal[name] &= old[name].shape == new[name].shape and np.allclose(
                old[name], new[name], rtol=0.0, atol=tolerance, equal_nan=True
            )
    unlike = {name for name, is_equal in equal.items() if not is_equal}
    for node in after.graph.nodes.values():
        if not unlike.isdisjoint(map(name_of, node.inputs)) and not _has_new_constants(before, node):
            unlike |= {name_of(output) for output in node.outputs} & equal.keys()
    return tuple(name for name in equal if name in unlike)


def _has_new_constants(before: PreparedModel, node: ir.Node) -> bool:
    """Return whether a constant input of `node` has another value in the model before, or does not exist there."""
    for value in node.inputs:
        new = constant(value)
        if value is not None and new is not None:
            old = constant(before.graph.values.get(name_of(value)))
            if old is None or not np.array_equal(new, old):
                return True
    return False
