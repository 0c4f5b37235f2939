"""Compare the answers of two models for one input, as sums that can be added up over inputs.

Each task has a function that returns the sums of one input, and a function from (added) sums to figures. So figures
over all inputs, over one input and over any selection of inputs come from the same two functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from edgeq_device.answers.answer import Answer
from numpy.typing import NDArray

from edgeq.errors import DataError

Sums = dict[str, float]
Figures = dict[str, float]


def _ratio(sums: Mapping[str, float], numerator: str, denominator: str) -> float | None:
    total = sums.get(denominator, 0.0)
    return sums.get(numerator, 0.0) / total if total else None


def _drop_undefined(figures: Mapping[str, float | None]) -> Figures:
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def compare_classes(reference: Answer, candidate: Answer) -> Sums:
    """Count the pixels of each class in both maps and in either. Further maps have classes of their own."""
    sums: Sums = {"equal": 0.0, "pixels": 0.0}
    further, candidate_further = (answer.maps for answer in (reference, candidate))
    pairs = {"": (reference.map, candidate.map), **{name: (further[name], candidate_further[name]) for name in further}}
    for name, (target, values) in pairs.items():
        a, b = (array.reshape(-1) for array in _same_shape(target, values))
        equal = a == b
        sums["equal"] += float(equal.sum())
        sums["pixels"] += float(equal.size)
        count_a, count_b, both = (_count_numbers(numbers) for numbers in (a, b, a[equal]))
        for number in {**count_a, **count_b}:
            common = both.get(number, 0)
            sums[f"{COMMON}{name}:{number}"] = float(common)
            sums[f"{EITHER}{name}:{number}"] = float(count_a.get(number, 0) + count_b.get(number, 0) - common)
    return sums


COMMON, EITHER = "common:", "either:"


def _count_numbers(numbers: NDArray[Any]) -> dict[int, int]:
    return dict(zip(*(array.tolist() for array in np.unique(numbers, return_counts=True)), strict=True))


def summarize_classes(sums: Mapping[str, float]) -> Figures:
    """Return the mean IoU over the classes that either model gives, and the share of equal pixels."""
    ious = [
        sums.get(COMMON + name[len(EITHER) :], 0.0) / pixels
        for name, pixels in sums.items()
        if name.startswith(EITHER) and pixels
    ]
    return _drop_undefined({"miou": float(np.mean(ious)) if ious else None, "pixels": _ratio(sums, "equal", "pixels")})


def compare_numbers(reference: Answer, candidate: Answer) -> Sums:
    """Sum what the coefficient of determination of each regressed value needs."""
    a, b = _vectors(reference, candidate)
    finite = np.isfinite(a) & np.isfinite(b)
    sums: Sums = {
        "difference": float(np.abs(b - a)[finite].sum()),
        "values": float(finite.sum()),
        "nonfinite": float((np.isfinite(a) & ~np.isfinite(b)).sum()),
    }
    for place in np.flatnonzero(finite):
        number, error = float(a[place]), float(b[place] - a[place])
        terms = {"n": 1.0, "sum": number, "squares": number**2, "errors": error**2}
        sums.update({f"{name}:{place}": value for name, value in terms.items()})
    return sums


def summarize_numbers(sums: Mapping[str, float]) -> Figures:
    """Return R² (1 minus the squared error by the variance, both summed over the values of a vector), and the mean
    absolute difference. R² is left out if the reference does not vary.
    """
    places = [name[2:] for name, count in sums.items() if name.startswith("n:") and count]
    errors = sum(sums[f"errors:{p}"] for p in places)
    spread = sum(max(sums[f"squares:{p}"] - sums[f"sum:{p}"] ** 2 / sums[f"n:{p}"], 0.0) for p in places)
    # Rounding leaves a rest of the squares also where all values are equal.
    varies = spread > 1e-12 * sum(sums[f"squares:{p}"] for p in places)
    figures = {"r2": 1 - errors / spread if varies else None, "difference": _ratio(sums, "difference", "values")}
    return _drop_undefined(figures)


def _vectors(reference: Answer, candidate: Answer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    a, b = _same_shape(reference.vector, candidate.vector)
    return a.astype(np.float64).reshape(-1), b.astype(np.float64).reshape(-1)


def _same_shape(target: Any, values: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return two arrays as they are.

    Raises:
        DataError: one is missing, or their shapes differ.
    """
    if target is None or values is None or np.shape(target) != np.shape(values):
        shapes = " and ".join("none" if array is None else str(list(np.shape(array))) for array in (target, values))
        raise DataError(f"the two models' answers cannot be compared: their shapes are {shapes}", "Use the same input")
    return np.asarray(target), np.asarray(values)
