"""Sum up the patches that layers read: their first and second moments.

These moments determine how an error in the weights affects a layer's output. An error dW of the weights changes the
output by dW x, which has the mean dW E[x] and the covariance dW Cov[x] dW'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.tuning.recover.layers import Floats, WeightedLayer

# Fewer patches than taps would make the covariance singular.
_PATCHES_PER_TAP = 4
_MIN_PATCHES, _MAX_PATCHES = 512, 8192
_PENDING_BYTES = 2**20
"""Bytes of a layer's patches to collect before multiplying them."""


@dataclass(frozen=True, eq=False)
class PatchMoments:
    """Hold moments of the patches that a layer reads.

    Attributes:
        count: number of patches seen.
        mean: float64 [groups, taps].
        covariance: float64 [groups, taps, taps].
    """

    count: int
    mean: Floats
    covariance: Floats

    @property
    def second(self) -> Floats:
        """Return the second moment about zero, float64 [groups, taps, taps]."""
        return np.asarray(self.covariance + self.mean[:, :, None] * self.mean[:, None, :], np.float64)


class PatchSums:
    """Hold sums over patches. Patches of several samples are multiplied at once: one large product instead of many
    small ones.

    The mean of the first patches is subtracted from all patches. If a mean far from zero were subtracted only at the
    end, the covariance would lose precision.

    Args:
        products: whether to sum products of taps as well. Without them, there is a mean, but no covariance.
    """

    def __init__(self, layer: WeightedLayer, *, products: bool = True) -> None:
        self._layer = layer
        self._count = 0
        self._pending: list[NDArray[np.float32]] = []
        self._origin: NDArray[np.float32] | None = None
        self._sum = np.zeros((layer.groups, layer.taps))
        self._sum_of_products = np.zeros((layer.groups, layer.taps, layer.taps)) if products else None

    def add(self, values: NDArray[Any], samples: int, random: np.random.Generator) -> None:
        """Add patches of the layer's input in one of `samples` samples. The patches are drawn by `random`."""
        patch_count = min(max(_PATCHES_PER_TAP * self._layer.taps, _MIN_PATCHES), _MAX_PATCHES)
        self._pending.append(self._layer.patches(values, -(-patch_count // samples), random))
        if sum(patches.nbytes for patches in self._pending) > _PENDING_BYTES:
            self._multiply()

    def _multiply(self) -> None:
        if self._pending:
            patches = np.concatenate(self._pending, axis=1)
            self._pending.clear()
            if self._origin is None:
                self._origin = patches.mean(1, keepdims=True)
            patches = patches - self._origin
            self._count += patches.shape[1]
            self._sum += patches.sum(1, dtype=np.float64)
            if self._sum_of_products is not None:
                self._sum_of_products += patches.transpose(0, 2, 1) @ patches

    def mean(self) -> Floats:
        """Return the mean of all patches so far, float64 [groups, taps]. At least one sample must have been added."""
        self._multiply()
        assert self._origin is not None, "no sample was added"
        return np.asarray(self._sum / self._count + self._origin[:, 0], np.float64)

    def moments(self) -> PatchMoments:
        """Return the moments of all patches so far. At least one sample must have been added."""
        mean = self.mean()
        assert self._sum_of_products is not None, "products were not summed"
        offset = self._sum / self._count
        covariance = self._sum_of_products / self._count - offset[:, :, None] * offset[:, None, :]
        return PatchMoments(self._count, mean, covariance)
