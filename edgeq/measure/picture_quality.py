"""Compare two pictures or maps: PSNR and SSIM."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EQUAL_DB = 100.0
"""PSNR of equal maps. The true figure is infinite, and no mean or interval could contain it."""
# The window and constants of Z. Wang et al., "Image Quality Assessment: From Error Visibility to Structural
# Similarity", 2004.
_WINDOW, _SIGMA, _K1, _K2 = 11, 1.5, 0.01, 0.03


def to_decibels(share: float) -> float:
    """Return the PSNR in dB for a mean squared error in units of the squared data range, at most `EQUAL_DB`."""
    return min(-10 * math.log10(share), EQUAL_DB) if share > 0 else EQUAL_DB


def compute_ssim(picture: NDArray[Any], target: NDArray[Any], data_range: float) -> float:
    """Return the structural similarity of two pictures [H, W] or [H, W, C], -1 to 1.

    A Gaussian window of 11 x 11 pixels with sigma 1.5 slides over all places where it fits entirely, so a border of
    5 pixels is cut. Variances are those of the weighted population. The result is the mean over places and channels.

    Raises:
        ValueError: a side is shorter than 11 pixels.
    """
    x, y = (np.asarray(array, np.float64).reshape(*array.shape[:2], -1) for array in (picture, target))
    if min(x.shape[:2]) < _WINDOW:
        raise ValueError(f"a picture of {x.shape[1]}x{x.shape[0]} is smaller than the window of {_WINDOW} pixels")
    mean_x, mean_y = _blur(x), _blur(y)
    variance_x, variance_y = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2
    covariance = _blur(x * y) - mean_x * mean_y
    c1, c2 = (_K1 * data_range) ** 2, (_K2 * data_range) ** 2
    numerator = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    denominator = (mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2)
    return float((numerator / denominator).mean())


def _blur(values: Floats) -> Floats:
    """Return the weighted mean of each place of values [H, W, C] where the window fits, [H - 10, W - 10, C]."""
    weights = np.exp(-((np.arange(_WINDOW) - _WINDOW // 2) ** 2) / (2 * _SIGMA**2))
    weights /= weights.sum()
    for axis in (0, 1):
        length = values.shape[axis] - _WINDOW + 1
        values = np.sum([w * values.take(range(n, n + length), axis) for n, w in enumerate(weights)], axis=0)
    return values
