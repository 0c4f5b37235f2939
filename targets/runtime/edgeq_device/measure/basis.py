"""Define what a figure is taken over: which elements of an output count, and which of them belong together.

Everything that compares two models reads a basis: proof, repair, search, debug, gate and report on the workstation, and
the self-test on the device. `edgeq.measure.basis` derives a basis from the float model, before anything is compared, so
all candidates are judged alike. `edgeq_device.measure.pairs` applies it. This module needs no numpy, because a bundle
is read before numpy is loaded.

| output | what its figures are taken over |
|---|---|
| contains numbers that mean "nothing", such as the scores of a mask | the elements that mean something in both models |
| has positions that a mask hides (padding) | the real positions |
| has rows that a TopK, NonMaxSuppression or the like orders | pairs of rows that describe the same thing |
| everything else | all elements, in place |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Sequence


@dataclass(frozen=True)
class Axis:
    """Name an axis of a tensor and its origin.

    Attributes:
        place: index of the axis, from 0.
        origin: the node or input with which the axis begins. Rows of one origin have one order.
    """

    place: int
    origin: str


@dataclass(frozen=True)
class Padding:
    """State which positions of which tensors a mask hides.

    Attributes:
        masks: input [N, S] → the truth value that its elements have at hidden positions.
        axes: tensor → the axis of its positions; the axis' origin is the input that masks them.
        keys: tensor → a second axis of positions. The scores of an attention have positions on two axes.
    """

    masks: Mapping[str, bool] = field(default_factory=dict)
    axes: Mapping[str, Axis] = field(default_factory=dict)
    keys: Mapping[str, Axis] = field(default_factory=dict)


@dataclass(frozen=True)
class Basis:
    """State what the figures of each tensor are taken over.

    Attributes:
        limits: tensor → smallest magnitude of a number that means nothing there; tensors without such numbers are
            absent.
        ranked: tensor → the axis of the rows whose order depends on the values.
        padding: the positions that masks hide.
    """

    limits: Mapping[str, float] = field(default_factory=dict)
    ranked: Mapping[str, Axis] = field(default_factory=dict)
    padding: Padding = field(default_factory=Padding)

    def of(self, names: Sequence[str]) -> Basis:
        """Return the basis of some tensors alone."""
        axes, keys = (
            {name: axis for name, axis in part.items() if name in names}
            for part in (self.padding.axes, self.padding.keys)
        )
        masks = {axis.origin: self.padding.masks[axis.origin] for axis in (*axes.values(), *keys.values())}
        return Basis(
            {name: limit for name, limit in self.limits.items() if name in names},
            {name: axis for name, axis in self.ranked.items() if name in names},
            Padding(masks, axes, keys),
        )


NO_PADDING = Padding()
EVERYTHING = Basis()
"""Every element counts, in place."""
