"""Find the weights with which sums of two products can saturate in 16 bits.

Some kernels multiply unsigned by signed bytes, and add the products of two neighbours along k in 16 bits. An unsigned
byte is at most 255. So the sum for two weights w and v has these limits:

    255 (min(w, 0) + min(v, 0)) <= sum <= 255 (max(w, 0) + max(v, 0))

The sum fits into 16 bits if the magnitude of neither sum in parentheses exceeds `PAIR_LIMIT`.
targets/onnxruntime/saturation.toml lists the operators that use such kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import HardwareError
from edgeq.util.folders import shipped
from edgeq.util.record_files import read_toml

# 128: with it, two products of weights and any unsigned bytes fit into 16 bits.
PAIR_LIMIT = (2**15 - 1) // 255
# Most elements along k that a kernel multiplies at once. Longer sums are split into equal parts.
_MAX_PART = 256

Order = Literal["taps, channels", "channels, taps"]


@dataclass(frozen=True)
class SaturatingPath:
    """Describe a kernel that adds two products in 16 bits.

    Attributes:
        operators: operator types of the optimised graph that use the kernel.
        left, right: dtypes of the operands of the kernel's matrix product.
        swapped: whether the weight is the left operand instead of the right one.
        order: order of the elements along k in a convolution.
        exact_depthwise: whether convolutions with one input channel per group use another kernel, which is exact.
        any_neighbours: whether different versions of the kernel pair different elements (`possible_sums`).
        even_channels: when a convolution pairs only channels of the same tap: "always", "ungrouped" (only if it has no
            groups), or "" for never. If it does, the last of an odd number of channels has no partner.
        exact_padding: whether a convolution adds the contribution of its padding in 32 bits.
        features: features of the CPUs that have this kernel; empty for all CPUs that no earlier path covers.
        modelled: whether `edgeq.emulate.kernels` can compute the operator.
    """

    operators: tuple[str, ...]
    left: str
    right: str
    swapped: bool = False
    order: Order = "taps, channels"
    exact_depthwise: bool = False
    any_neighbours: bool = False
    even_channels: Literal["", "ungrouped", "always"] = ""
    exact_padding: bool = False
    features: tuple[str, ...] = ()
    modelled: bool = False

    def evens(self, group: int) -> bool:
        """Return whether a convolution with this number of groups pairs only channels of the same tap."""
        return self.even_channels == "always" or (self.even_channels == "ungrouped" and group == 1)

    @property
    def activation(self) -> str:
        """Return the dtype of the activation."""
        return self.right if self.swapped else self.left

    @property
    def weight(self) -> str:
        """Return the dtype of the weight."""
        return self.left if self.swapped else self.right


@dataclass(frozen=True)
class SaturationTable:
    """List all saturating paths, and the session option that makes some operators exact."""

    paths: tuple[SaturatingPath, ...]
    precision_option: str
    precision_operators: frozenset[str]

    def path(self, op_type: str, activation: str, weight: str) -> SaturatingPath | None:
        """Return the saturating path of an operator with operands of these dtypes. Return None if the operator is
        exact.
        """
        return next(
            (p for p in self.paths if op_type in p.operators and (p.activation, p.weight) == (activation, weight)), None
        )


@dataclass(frozen=True)
class _Precision:
    option: str = ""
    operators: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _SaturationFile:
    title: str
    source: str
    path: tuple[SaturatingPath, ...]
    precision: _Precision = _Precision()


@cache
def saturation_table(
    file: str = "onnxruntime/saturation.toml", features: frozenset[str] = frozenset()
) -> SaturationTable:
    """Return the saturating kernels of a CPU with `features`, from a file under targets/. The default file describes
    ONNX Runtime's own kernels.

    Raises:
        HardwareError: the file is malformed.
    """
    content = read_toml(shipped("targets") / file, _SaturationFile, HardwareError, "Correct the file")
    # Paths with features come first in the file, so a CPU with better kernels does not get the general path.
    paths = tuple(path for path in content.path if features.issuperset(path.features))
    return SaturationTable(paths, content.precision.option, content.precision.operators)


def exact_options() -> dict[str, str]:
    """Return the session options that make ONNX Runtime's own kernels exact on every CPU. They only affect the
    operators in `SaturationTable.precision_operators`.
    """
    return {saturation_table().precision_option: "1"}


def pairs_vary(depth: int, channels: int) -> bool:
    """Return whether kernels pair the elements along k in different ways. This is the case if a tap has an odd number
    of channels, or if k exceeds 256 and some kernels split it into equal parts of an odd size.
    """
    return channels % 2 == 1 or (depth > _MAX_PART and -(-depth // -(-depth // _MAX_PART)) % 2 == 1)


def with_even_channels(values: NDArray[Any], fill: int = 0, *, group: int = 1) -> NDArray[Any]:
    """Return an array [N, C, ...] with an even number of channels in each group. If the number is odd, add to each
    group one channel that is filled with `fill`.
    """
    n, channels, *spatial = values.shape
    if channels // group % 2 == 0:
        return values
    parts = values.reshape(n, group, channels // group, *spatial)
    padded = np.pad(parts, [(0, 0), (0, 0), (0, 1), *[(0, 0)] * len(spatial)], constant_values=fill)
    return padded.reshape(n, -1, *spatial)


def as_pairs(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the weights [N, K] at even k and those at odd k, each [N, ceil(K / 2)]. If K is odd, the missing weight is
    0.
    """
    evens, odds = rows[:, 0::2], rows[:, 1::2]
    # The last element of an odd number has no partner, as if its partner were zero.
    if odds.shape[1] < evens.shape[1]:
        odds = np.pad(odds, ((0, 0), (0, 1)))
    return evens, odds


def pair_sums(rows: NDArray[Any]) -> NDArray[Any]:
    """Return a bound for each pair along k, as [N, ceil(K / 2)]. The bound is the sum of the pair's positive weights or
    the magnitude of the sum of its negative weights, whichever is larger.

    Args:
        rows: weights [N, K]. For integers, the result is int32.
    """
    # In int8, the sum of two weights would wrap around.
    if rows.dtype.kind in "iu":
        rows = rows.astype(np.int32)
    evens, odds = as_pairs(rows)
    upper = np.maximum(evens, 0) + np.maximum(odds, 0)
    lower = np.minimum(evens, 0) + np.minimum(odds, 0)
    result: NDArray[Any] = np.maximum(upper, -lower)
    return result


def neighbour_sums(rows: NDArray[Any]) -> NDArray[Any]:
    """Return `pair_sums` for every two neighbours along k, [N, K]. This covers kernels that split k at an odd index or
    leave the last channel of a tap without a partner.
    """
    return np.concatenate([pair_sums(rows), pair_sums(rows[:, 1:])], axis=1)


def largest_two(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the largest value of `pair_sums` for any two elements of a row, [N, 1]."""
    # The two largest and the two smallest of a row bound every pair in it.
    ordered = np.sort(rows.astype(np.int32) if rows.dtype.kind in "iu" else rows, axis=1)
    above, below = np.maximum(ordered[:, -2:], 0).sum(axis=1), np.minimum(ordered[:, :2], 0).sum(axis=1)
    result: NDArray[Any] = np.maximum(above, -below)[:, None]
    return result


def possible_sums(rows: NDArray[Any], channels: int) -> NDArray[Any]:
    """Return `pair_sums` for all pairs that different kernels may form.

    Args:
        channels: number of image channels that one output of a convolution reads. With 1, any two taps may be a pair.
            Use 0 for a matrix product.
    """
    # With one channel, k consists of taps alone, and any two of them may be neighbours.
    if channels == 1:
        return largest_two(rows)
    return neighbour_sums(rows) if pairs_vary(rows.shape[1], channels) else pair_sums(rows)


def conv_rows(weight: NDArray[Any], order: Order = "taps, channels") -> NDArray[Any]:
    """Return a convolution's weight [cout, cin / group, *kernel] as rows along k: [cout, K]."""
    if order == "taps, channels":
        weight = np.moveaxis(weight, 1, -1)
    return weight.reshape(len(weight), -1)
