"""Test whether arrays can be what a family takes them for: scores, boxes, rows of a grid."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

# Rounding may take a score after a sigmoid outside 0 to 1 by up to this much.
_ROUNDING = 1e-3
# Boxes as shares of the input's size reach a little over its edges.
_LARGEST_SHARE = 2.0


def are_scores(values: Any) -> bool:
    """Return whether all values can be scores after a sigmoid or softmax, from 0 to 1."""
    return bool(values.size and values.min() >= -_ROUNDING and values.max() <= 1 + _ROUNDING)


def single_rows(outputs: Mapping[str, Any], rank: int = 3) -> Optional[Tuple[str, Any]]:
    """Return the name and the content [a, b] of the only float output of shape [1, a, b], or None."""
    fitting = [
        (name, array)
        for name, array in outputs.items()
        if array.ndim == rank and array.shape[0] == 1 and array.dtype.kind == "f" and array.size
    ]
    return (fitting[0][0], fitting[0][1][0]) if len(fitting) == 1 else None


def find_unit(boxes: Any) -> str:
    """Return "share" if boxes [N, 4] (corners, or centre and size) are shares of the input's size, else "pixel".

    Infinite boxes come from the exponents of a raw head and do not show the unit. Boxes in pixels of a real image reach
    much further than two pixels.
    """
    finite = np.asarray(boxes, np.float64)[np.isfinite(boxes).all(axis=1)]
    # Only zeros, the rows of an image without objects, do not show it either.
    return "share" if 0 < np.abs(finite).max(initial=0.0) <= _LARGEST_SHARE else "pixel"


def state_unit(boxes: Any, usual: str = "pixel") -> Dict[str, str]:
    """Return the parameter "unit" of boxes [N, 4] if it is not the family's usual unit."""
    unit = find_unit(boxes) if np.any(boxes) else usual
    return {} if unit == usual else {"unit": unit}


def to_pixels(boxes: Any, unit: Any, size: Tuple[int, int]) -> Any:
    """Return boxes [N, 4] or points [..., 2 n] in pixels of the model's input of `size` (width, height)."""
    if unit not in ("pixel", "share"):
        raise ValueError(f"the unit is {unit!r}")
    factor = np.resize(np.asarray(size, np.float64), np.shape(boxes)[-1]) if unit == "share" else 1.0
    return np.asarray(boxes, np.float64) * factor


def find_rows(outputs: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the float outputs [1], [1, D] and [1, D, 1, 1] by name, as float64 [D]."""
    return {
        name: read_row(array)
        for name, array in outputs.items()
        if array.dtype.kind == "f" and array.size and array.size == (array.shape[1] if array.ndim > 1 else 1)
    }


def read_row(array: Any) -> Any:
    """Return an output [1], [1, D] or [1, D, 1, 1] as float64 [D]."""
    if not array.size or array.size != (array.shape[1] if array.ndim > 1 else 1):
        raise ValueError("the output is not one row")
    return np.asarray(array, np.float64).reshape(-1)
