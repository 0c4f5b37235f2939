"""Integers for the rows of a layer's weights, for the least expected error of its output (GPTQ).

The output is off by dW x, with the expected square sum_m dW[m] H dW[m]' where H is the second moment of x. Columns are
rounded one after the other, and each one's error is compensated by the columns that follow: with H^-1 = U'U, U upper
triangular, the error e of column i is spread as w[j] -= e U[i, j] / U[i, i] for j > i (Frantar and Alistarh 2022,
"Optimal Brain Compression"; Frantar et al. 2022, "GPTQ"). A sweep of coordinate descent follows.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

T = TypeVar("T", bound=np.generic)

_BLOCK = 32
_DAMPING = 1e-3
_SWEEPS = 1


def round_rows(
    rows: Floats,
    metric: Floats,
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    *,
    scale: ArrayLike = 1.0,
    block: int = _BLOCK,
) -> NDArray[np.int64]:
    """Integers q, so that scale * q stands for the rows.

    Args:
        rows: float64 [groups, m, k].
        metric: float64 [groups, k, k], positive definite.
        low, high: of the integers, broadcastable to the rows.
        scale: of each weight, broadcastable to the rows; negative ones too.
        block: columns whose errors are spread at once over those behind the block.
    """
    upper = np.linalg.cholesky(np.linalg.inv(metric)).transpose(0, 2, 1)
    # One column after the other is read and written: they are rows in memory here.
    low, high, scale = (_columns(np.broadcast_to(values, rows.shape)) for values in (low, high, scale))
    columns = _columns(rows)
    remaining = columns.copy()
    integers = np.empty(columns.shape, np.int64)
    taps = columns.shape[1]
    for first in range(0, taps, block):
        last = min(first + block, taps)
        errors = np.empty((len(columns), last - first, columns.shape[2]))
        for column in range(first, last):
            step, left = scale[:, column], remaining[:, column]
            integers[:, column] = np.clip(np.rint(left / step), low[:, column], high[:, column])
            error = (left - integers[:, column] * step) / upper[:, column, column, None]
            errors[:, column - first] = error
            remaining[:, column + 1 : last] -= upper[:, column, column + 1 : last, None] * error[:, None]
        remaining[:, last:] -= upper[:, first:last, last:].transpose(0, 2, 1) @ errors
    return _columns(_descended(columns, metric, integers, low, high, scale, block))


def _columns(rows: NDArray[T]) -> NDArray[T]:
    """[groups, m, k] ↔ [groups, k, m], in memory too."""
    return np.ascontiguousarray(rows.transpose(0, 2, 1))


def _descended(
    columns: Floats,
    metric: Floats,
    integers: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    scale: Floats,
    block: int,
) -> NDArray[np.int64]:
    """Each column in turn set to what is best while the others stay; every step lowers the error or keeps it. All
    arrays are [groups, k, m]."""
    slope = metric @ (columns - scale * integers)
    taps = columns.shape[1]
    for _ in range(_SWEEPS):
        for first in range(0, taps, block):
            last = min(first + block, taps)
            near = slope[:, first:last].copy()
            moved = np.zeros(near.shape)
            for column in range(first, last):
                own = metric[:, column, column, None] * scale[:, column]
                # As steps from where it is, so that what is not worth a whole step stays.
                steps = np.rint(near[:, column - first] / own).astype(np.int64)
                steps = np.clip(integers[:, column] + steps, low[:, column], high[:, column]) - integers[:, column]
                if steps.any():
                    integers[:, column] += steps
                    moved[:, column - first] = change = steps * scale[:, column]
                    near -= metric[:, first:last, column, None] * change[:, None]
            slope -= metric[:, :, first:last] @ moved
    return integers


def damped(moment: Floats, step: float) -> Floats:
    """A second moment [groups, k, k] with the input's rounding error on its diagonal, surely positive definite."""
    taps = moment.shape[-1]
    trace = np.trace(moment, axis1=1, axis2=2) / taps
    diagonal = step**2 / 12 + _DAMPING * trace + np.finfo(np.float64).tiny ** 0.5
    return np.asarray(moment + diagonal[:, None, None] * np.eye(taps), np.float64)


def squared(errors: Floats, metric: Floats) -> Floats:
    """The expected square of each output's error, float64 [groups, m], where the weights are off by `errors`."""
    return np.asarray(np.einsum("gmk,gmk->gm", errors @ metric, errors), np.float64)
