"""Measure depth estimation: absolute relative error (AbsRel), RMSE, and the share of pixels within 25 % (delta < 1.25).

Pixels whose label is 0, negative or not finite have no depth. A model may give metric depth or relative inverse depth
(disparity, without a scale), such as MiDaS and Depth Anything. `metric` figures use the answer as it is. The others
first fit a scale and a shift to 1 / depth by least squares for each image, as MiDaS evaluates (R. Ranftl et al.,
2020). The primary figure is the share within 25 % after the fit: it has a meaning for both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.answers.answer import Answer
from numpy.typing import NDArray

from edgeq.data.label_maps import read_numbers_map
from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.answer_metric import AnswerMetric, add_up, describe_shape, read_label
from edgeq.measure.answer_sums import Sums
from edgeq.measure.task import TaskKind

# The ratio of two depths below which they count as right.
_WITHIN = 1.25
# The fit may give a disparity of 0 or less, which no depth has. It is infinitely far away for the ratio.
_FARTHEST = 1e6


def read(answer: Answer, sample: Sample) -> Sums:
    """Sum the errors of one image. The label is a map [H, W] of depths, or the path of one."""
    label = read_label(sample)
    truth = np.asarray(read_numbers_map(label) if isinstance(label, Path) else label, np.float64)
    if answer.map is None or np.shape(answer.map) != truth.shape:
        raise DataError(
            f"{sample.name}: the label is {list(truth.shape)}, the answer {describe_shape(answer.map)}",
            "Give depths in the size of the image",
        )
    usable = np.isfinite(truth) & (truth > 0)
    depth, values = truth[usable], np.asarray(answer.map, np.float64)[usable]
    if not depth.size:
        return {}
    return {
        "images": 1.0,
        **_sum_errors(fit_disparity(values, depth), depth, ""),
        **_sum_errors(values, depth, "metric_"),
    }


def fit_disparity(values: NDArray[Any], depth: NDArray[Any]) -> NDArray[np.float64]:
    """Return depths from values [N]: 1 / (scale * value + shift), with the least squared error in 1 / depth.

    Values that grow with the depth instead are fitted by their inverse.
    """
    target = 1 / depth
    values = np.where(np.isfinite(values), values, 0.0)
    inverse = (
        (values > 0).all() and np.corrcoef(values, target)[0, 1] < 0 if np.ptp(values) and np.ptp(target) else False
    )
    columns = np.stack([1 / values if inverse else values, np.ones_like(values)], axis=1)
    fitted = columns @ np.linalg.lstsq(columns, target, rcond=None)[0]
    depths: NDArray[np.float64] = 1 / np.maximum(fitted, 1 / _FARTHEST)
    return depths


def _sum_errors(values: NDArray[Any], depth: NDArray[Any], prefix: str) -> Sums:
    values = np.where(np.isfinite(values), values, _FARTHEST)
    ratio = np.maximum(values / depth, depth / np.maximum(values, 1 / _FARTHEST))
    errors = {
        "abs_rel": (np.abs(values - depth) / depth).mean(),
        "squared": ((values - depth) ** 2).mean(),
        "delta": ((ratio < _WITHIN) & (values > 0)).mean(),
    }
    return {prefix + name: float(value) for name, value in errors.items()}


def summarize(values: Sequence[Sums]) -> Mapping[str, float]:
    """Return the figures, each a mean over images: "delta1", "abs_rel", "rmse", and the same with "metric_"."""
    sums = add_up(values)
    images = sums["images"]
    if not images:
        raise DataError("no label has a depth", "Give depths above 0")
    figures = {}
    for prefix in ("", "metric_"):
        figures[f"{prefix}delta1"] = sums[f"{prefix}delta"] / images
        figures[f"{prefix}abs_rel"] = sums[f"{prefix}abs_rel"] / images
        figures[f"{prefix}rmse"] = math.sqrt(sums[f"{prefix}squared"] / images)
    return figures


TASK = TaskKind(
    "depth",
    "share of pixels within 25 % of the depth, AbsRel and RMSE",
    lambda options: AnswerMetric("depth", "delta1", read, summarize, frozenset({"depth"})),
    frozenset(),
)
