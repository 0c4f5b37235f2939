"""Choose integers for the rows of a layer's weights so that the expected error of the layer's output is small (GPTQ).

The output error is dW x. Its expected square is sum_m dW[m] H dW[m]', where H is the second moment of x. Columns are
rounded one after the other, and the columns that follow compensate for the error of each. With H^-1 = U'U, U upper
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
    """Return integers q such that scale * q approximates the rows with a small expected error (GPTQ).

    Args:
        rows: float64 [groups, m, k].
        metric: second moment of the inputs, float64 [groups, k, k], positive definite.
        low, high: limits of the integers, broadcastable to the rows.
        scale: scale of each weight, broadcastable to the rows; may be negative.
        block: number of columns whose errors are collected before they are spread over the later columns.
    """
    upper = _invert_factor(metric)
    # The loop reads and writes one column after another, so the columns are contiguous in memory here.
    low, high, scale = (_columns(np.broadcast_to(values, rows.shape)) for values in (low, high, scale))
    columns = _columns(rows)
    remaining = columns.copy()
    integers = np.empty(columns.shape, np.int64)
    taps = columns.shape[1]
    for start in range(0, taps, block):
        stop = min(start + block, taps)
        errors = np.empty((len(columns), stop - start, columns.shape[2]))
        for column in range(start, stop):
            step, target = scale[:, column], remaining[:, column]
            integers[:, column] = np.clip(np.rint(target / step), low[:, column], high[:, column])
            error = (target - integers[:, column] * step) / upper[:, column, column, None]
            errors[:, column - start] = error
            remaining[:, column + 1 : stop] -= upper[:, column, column + 1 : stop, None] * error[:, None]
        remaining[:, stop:] -= upper[:, start:stop, stop:].transpose(0, 2, 1) @ errors
    return _columns(_descend(columns, metric, integers, low, high, scale, block))


def _invert_factor(metric: Floats) -> Floats:
    """Return U, upper triangular, with metric^-1 = U'U.

    In reverse order of the taps, the metric is LL' (Cholesky), and U is L^-1 in reverse order. This is cheaper and more
    accurate than to factorize the inverse of the metric.
    """
    lower = np.asarray(np.linalg.cholesky(metric[:, ::-1, ::-1]), np.float64)
    return _invert_lower(lower)[:, ::-1, ::-1]


def _invert_lower(lower: Floats) -> Floats:
    """Return the inverse of lower triangular matrices [groups, k, k]. Halves are inverted one after the other:

    [A 0; B C]^-1 = [A^-1 0; -C^-1 B A^-1 C^-1]
    """
    taps = lower.shape[-1]
    if taps <= _BLOCK:
        return np.asarray(np.linalg.inv(lower), np.float64)
    half = taps // 2
    first, second = _invert_lower(lower[:, :half, :half]), _invert_lower(lower[:, half:, half:])
    inverse = np.zeros(lower.shape)
    inverse[:, :half, :half], inverse[:, half:, half:] = first, second
    inverse[:, half:, :half] = -second @ (lower[:, half:, :half] @ first)
    return inverse


def _columns(rows: NDArray[T]) -> NDArray[T]:
    """Swap the last two axes, [groups, m, k] to [groups, k, m] or back. The result is contiguous in memory."""
    return np.ascontiguousarray(rows.transpose(0, 2, 1))


def _descend(
    columns: Floats,
    metric: Floats,
    integers: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    scale: Floats,
    block: int,
) -> NDArray[np.int64]:
    """Set each column in turn to its best integers while the others are fixed, and return all integers.

    No step increases the error. All arrays are [groups, k, m].
    """
    slope = metric @ (columns - scale * integers)
    taps = columns.shape[1]
    for _ in range(_SWEEPS):
        for start in range(0, taps, block):
            stop = min(start + block, taps)
            block_slope = slope[:, start:stop].copy()
            moved = np.zeros(block_slope.shape)
            for column in range(start, stop):
                curvature = metric[:, column, column, None] * scale[:, column]
                # The difference from the current integer is rounded, so a change of less than half a step does not move
                # the integer.
                steps = np.rint(block_slope[:, column - start] / curvature).astype(np.int64)
                steps = np.clip(integers[:, column] + steps, low[:, column], high[:, column]) - integers[:, column]
                if steps.any():
                    integers[:, column] += steps
                    moved[:, column - start] = change = steps * scale[:, column]
                    block_slope -= metric[:, start:stop, column, None] * change[:, None]
            slope -= metric[:, :, start:stop] @ moved
    return integers


def damp(moment: Floats, step: float) -> Floats:
    """Return a second moment [groups, k, k] with the rounding error of the inputs added to its diagonal.

    The result is positive definite.
    """
    taps = moment.shape[-1]
    trace = np.trace(moment, axis1=1, axis2=2) / taps
    diagonal = step**2 / 12 + _DAMPING * trace + np.finfo(np.float64).tiny ** 0.5
    return np.asarray(moment + diagonal[:, None, None] * np.eye(taps), np.float64)


def squared_errors(errors: Floats, metric: Floats) -> Floats:
    """Return the expected squared error of each output, float64 [groups, m], if the weights are off by `errors`."""
    return np.asarray(np.einsum("gmk,gmk->gm", errors @ metric, errors), np.float64)
