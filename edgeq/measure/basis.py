"""Derive from a float model what the figures of its outputs are taken over. See `edgeq_device.measure.basis`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from edgeq_device.measure.basis import Basis
from numpy.typing import NDArray

from edgeq.calibration.sentinels import find_limits
from edgeq.calibration.statistics import Nonfinite, Statistics, TensorStatistics, histogram_of
from edgeq.data.samples import Samples
from edgeq.measure.inference import Session, infer
from edgeq.model.axes import ranked_axes
from edgeq.model.graph import GraphIndex
from edgeq.model.padding import find_padding
from edgeq.model.shapes import unknown_shapes, write_shapes

_SAMPLES = 8
"""Number of samples from which limits are derived if there are no statistics."""


def find_basis(graph: GraphIndex, statistics: Statistics) -> Basis:
    """Return what the figures of a float model's tensors are taken over.

    Args:
        statistics: the statistics of the tensors. A tensor without statistics has no limit.
    """
    return Basis(find_limits(graph, statistics), ranked_axes(graph), find_padding(graph))


def sampled_basis(graph: GraphIndex, session: Session, samples: Samples) -> Basis:
    """Return what the figures of a float model's outputs are taken over, judged by its first samples.

    Args:
        graph: the model. If it has tensors of unknown rank, their shapes are inferred in a copy.
        session: a session of the model.
    """
    # Padding and rows without a fixed place are found by shapes. The caller's model stays as it is.
    if unknown_shapes(graph.model):
        described = graph.model.clone()
        write_shapes(described, None)
        graph = GraphIndex(described)
    tensors: dict[str, TensorStatistics] = {}
    for sample in itertools.islice(samples, _SAMPLES):
        for name, array in {**sample.inputs, **infer(session, sample)}.items():
            # Statistics are float32, which values of float64 may exceed.
            if array.dtype.kind == "f" and array.dtype.itemsize <= 4:
                array_statistics = _statistics_of(array)
                tensors[name] = tensors[name].merge(array_statistics) if name in tensors else array_statistics
    return find_basis(graph, Statistics("", "", _SAMPLES, tensors))


def _statistics_of(array: NDArray[Any]) -> TensorStatistics:
    values = array[np.isfinite(array)].astype(np.float32)
    nonfinite = Nonfinite(int(np.isnan(array).sum()), int(np.isneginf(array).sum()), int(np.isposinf(array).sum()))
    return TensorStatistics(
        samples=1,
        nonempty=int(values.size > 0),
        count=values.size,
        minimum=float(values.min(initial=np.inf)),
        maximum=float(values.max(initial=-np.inf)),
        histogram=histogram_of(values),
        nonfinite=nonfinite,
    )
