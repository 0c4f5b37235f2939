"""Compare quantization noise with what an image-to-image model adds to its input.

The outputs of a super-resolution model or a denoiser resemble their input, enlarged if necessary. An SQNR over such an
output mostly describes the input: at 24 dB, the noise may exceed everything that the model adds, so the quantized model
is worse than an interpolation. edgeq fits the interpolated input to float32's output f with one factor and one offset,
by least squares:

    u         the input, enlarged by bicubic interpolation (R. Keys: Cubic convolution interpolation, 1981)
    added     the power of f - (a u + b)
    noise     the power of the candidate's output minus f
    margin    10 log10(added / noise)

If float32's output is the best estimate, its error is smaller than the interpolation's by the power that it adds. So at
a margin of 0 dB, the candidate is as wrong as the interpolation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgeq.measure.inference import Outputs
from edgeq.util.records import NullIsInfinite

Floats = NDArray[np.float64]
LEAST_MARGIN_DB = 6.0
"""Below this margin, a quarter or more of what the model adds to its input is lost in noise."""
# Bounds the time for the interpolation in float64. Further rows are ignored.
_MOST_ROWS = 32
# An image has two axes and at least one of rows or channels. A larger ratio of sizes is not taken for an enlargement.
_LEAST_RANK, _MOST_FACTOR = 3, 8
# Share of the variance of float32's output that the interpolated input explains if the output resembles it.
_RESEMBLES = 0.5


@dataclass(frozen=True)
class BaselineMargin:
    """Hold the power that the float model adds to its interpolated input, in relation to the quantization noise.

    Attributes:
        output: name of the output; `factor` is its size divided by the input's.
        margin_db: the ratio of the two powers in dB.
    """

    output: str
    factor: int
    margin_db: NullIsInfinite

    @property
    def sentence(self) -> str:
        """Return a sentence on the noise."""
        copy = "its input" if self.factor == 1 else f"its input enlarged {self.factor} times"
        share = 10 ** (-self.margin_db / 10)
        return (
            f"output {self.output!r} resembles {copy}, and the quantization noise has {share:.2g} times the power of "
            "all that the float model adds to it"
        )


@dataclass
class _BaselineSums:
    """Hold sums over the elements of one output: of u, f, u², u f and f² (see above), and of the noise."""

    factor: int
    count: int = 0
    moments: Floats = field(default_factory=lambda: np.zeros(5))
    noise: float = 0.0


@dataclass
class BaselineSums:
    """Collect one candidate's outputs that have the form of an input. Only the first 32 rows are used."""

    rows: int = 0
    outputs: dict[str, _BaselineSums] = field(default_factory=dict)

    def update(self, reference: Outputs, candidate: Outputs, inputs: Mapping[str, NDArray[np.generic]]) -> None:
        """Add the outputs of both models for one sample."""
        if self.rows >= _MOST_ROWS:
            return
        self.rows += 1
        for name, array in reference.items():
            candidate_array = candidate.get(name)
            if array.dtype.kind != "f" or candidate_array is None or candidate_array.shape != array.shape:
                continue
            # One input is enough: the first with the output's form is taken for the one that the output resembles.
            for input_array in inputs.values():
                factor = _find_factor(input_array.shape, array.shape)
                if factor and input_array.dtype.kind in "fiu":
                    self._add(name, enlarge(input_array.astype(np.float64), factor), array, candidate_array, factor)
                    break

    def _add(
        self, name: str, copy: Floats, reference: NDArray[np.generic], candidate: NDArray[np.generic], factor: int
    ) -> None:
        u, f, q = (array.astype(np.float64).ravel() for array in (copy, reference, candidate))
        # A single NaN would turn the sums of the whole output into NaN.
        finite = np.isfinite(u) & np.isfinite(f) & np.isfinite(q)
        u, f, q = u[finite], f[finite], q[finite]
        sums = self.outputs.setdefault(name, _BaselineSums(factor))
        sums.count += len(f)
        sums.moments += [u.sum(), f.sum(), u @ u, u @ f, f @ f]
        sums.noise += float((q - f) @ (q - f))

    def merge(self, chunk: BaselineSums) -> None:
        """Add the sums of later samples."""
        if self.rows >= _MOST_ROWS:
            return
        self.rows += chunk.rows
        for name, part in chunk.outputs.items():
            sums = self.outputs.setdefault(name, _BaselineSums(part.factor))
            sums.count += part.count
            sums.moments += part.moments
            sums.noise += part.noise

    def result(self) -> BaselineMargin | None:
        """Return the lowest margin among the outputs that resemble an input, or None if there is none."""
        margins = [margin for name, sums in self.outputs.items() if (margin := _find_margin(name, sums)) is not None]
        return min(margins, key=lambda margin: margin.margin_db, default=None)


def _find_margin(name: str, sums: _BaselineSums) -> BaselineMargin | None:
    if not sums.count:
        return None
    u, f, uu, uf, ff = sums.moments / sums.count
    spread, power = uu - u * u, ff - f * f
    # A constant input or output cannot be fitted.
    if spread <= 0 or power <= 0:
        return None
    added = power - (uf - u * f) ** 2 / spread
    # An output that the input hardly explains is a result of its own, such as a mask.
    if added <= 0 or added > (1 - _RESEMBLES) * power:
        return None
    noise = sums.noise / sums.count
    return BaselineMargin(name, sums.factor, 10 * math.log10(added / noise) if noise > 0 else math.inf)


def _find_factor(input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> int:
    """Return the whole number by which an output's two image axes are larger than an input's. Return 0 if the output
    does not have the form of the input.
    """
    if len(input_shape) != len(output_shape) or len(input_shape) < _LEAST_RANK or 0 in input_shape:
        return 0
    ratios = [b / a for a, b in zip(input_shape, output_shape, strict=True) if a != b]
    if not ratios:
        return 1
    factor = int(ratios[0])
    is_uniform = len(ratios) == 2 and ratios[0] == ratios[1] == factor
    return factor if is_uniform and 1 < factor <= _MOST_FACTOR and input_shape[0] == output_shape[0] else 0


def enlarge(array: Floats, factor: int) -> Floats:
    """Return an array whose two image axes are `factor` times as long, by bicubic interpolation. The image axes are the
    last two, or the two before the last if that has at most four indices.
    """
    if factor == 1:
        return array
    image_end = array.ndim - (1 if array.ndim > _LEAST_RANK and array.shape[-1] <= 4 < array.shape[1] else 0)
    for axis in (image_end - 2, image_end - 1):
        array = _enlarge_axis(array, factor, axis)
    return array


def _enlarge_axis(array: Floats, factor: int, axis: int) -> Floats:
    length = array.shape[axis]
    # The centres of pixels are aligned, not their corners.
    at = (np.arange(length * factor) + 0.5) / factor - 0.5
    below = np.floor(at).astype(np.int64)
    shape = [-1 if k == axis else 1 for k in range(array.ndim)]
    total = np.zeros_like(np.repeat(array, factor, axis))
    for tap in range(-1, 3):
        weight = _weigh_cubic(np.abs(at - (below + tap)))
        # Beyond the edge, the pixels at the edge are repeated.
        total += weight.reshape(shape) * array.take(np.clip(below + tap, 0, length - 1), axis)
    return total


def _weigh_cubic(distance: Floats) -> Floats:
    """Return Keys' kernel with a = -1/2."""
    inner = 1.5 * distance**3 - 2.5 * distance**2 + 1
    outer = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
    weight: Floats = np.where(distance <= 1, inner, np.where(distance < 2, outer, 0.0))
    return weight
