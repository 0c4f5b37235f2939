"""Write the preprocessing of a model as constants for C++.

Additions, subtractions, multiplications and divisions in a row become one scale and one offset for each channel. The
other steps are listed as text, because an application on a chip takes its pixels from a camera and not from a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.data.steps.arithmetic import Arithmetic


def preprocessing_lines(preprocess: Any) -> list[str]:
    """Return lines of C++ for a header: the steps as comments, then the constants.

    Args:
        preprocess: an `edgeq.data.preprocess.Preprocess`, or None if the samples are inputs of the model already.
    """
    if preprocess is None or preprocess.spec is None:
        return ["// The samples were inputs of the model as they are."]
    steps = preprocess.spec.steps
    scale, offset = _affine([step for step in steps if isinstance(step, Arithmetic)])
    return [
        *(f"// Step {number}: {step.describe()}." for number, step in enumerate(steps, 1)),
        "// integer = round((value * scale + offset) * 2^-exponent); one scale and offset for all or for each channel.",
        f"constexpr float kEdgeqScale[] = {_numbers(scale)};",
        f"constexpr float kEdgeqOffset[] = {_numbers(offset)};",
    ]


def _affine(steps: Sequence[Arithmetic]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scale and offset of the steps together, in one dimension."""
    # A line is known from two points: the steps are run on 0 and on 1.
    low, high = np.zeros(1), np.ones(1)
    for step in steps:
        value = np.atleast_1d(np.asarray(step.value, np.float64))
        low, high = (np.asarray(type(step).compute(point, value)) for point in (low, high))
    return np.broadcast_to(high - low, low.shape), low


def _numbers(values: NDArray[np.float64]) -> str:
    return "{" + ", ".join(f"{float(value):.9g}f" if value % 1 else f"{float(value):.1f}f" for value in values) + "}"
