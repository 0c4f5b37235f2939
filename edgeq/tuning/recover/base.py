"""Define the interface of a recovery. A recovery takes the state of a build and returns a better one."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgeq.backends.base import Artifact
from edgeq.calibration.ranges import Range
from edgeq.calibration.rescaled import RescaledTensor
from edgeq.calibration.statistics import Statistics
from edgeq.data.samples import Samples
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import Mode, Scheme
from edgeq.util.display import Progress

Stage = Literal["model", "ranges", "artifact"]


@dataclass(frozen=True)
class RecoveryState:
    """Hold everything that a recovery may read and replace.

    Attributes:
        prepared: the float model to quantize. A "model" recovery replaces it by an equivalent one.
        statistics: statistics of `prepared` on the calibration samples; None if the scheme is not static. A "model"
            recovery leaves them as they are: they are derived from its result.
        rescaled: tensors of `prepared` whose channels the "model" recovery has scaled, and scaled copies that it has
            added. Every other tensor must have the values of the tensor of the same name before, or be new. None if the
            recovery does not know; edgeq then compares the tensors on some samples.
        ranges: ranges by tensor. Before ranges are derived, these are only the ranges that a model recovery has fixed.
        scheme: how to quantize. A "ranges" recovery may add to `exclude`.
        changed: names of the layers that "model" recoveries changed. The change is wasted on layers that stay in float.
        artifact: the artifact; None before it is built.
        notes: one sentence for each change.
    """

    prepared: PreparedModel
    statistics: Statistics | None
    ranges: Mapping[str, Range]
    scheme: Scheme
    artifact: Artifact | None = None
    notes: tuple[str, ...] = ()
    changed: frozenset[str] = frozenset()
    rescaled: Mapping[str, RescaledTensor] | None = None

    def replace(self, **changes: Any) -> RecoveryState:
        """Return a copy with `changes`."""
        return dataclasses.replace(self, **changes)

    def note(self, *texts: str) -> RecoveryState:
        """Return a copy with more notes."""
        return self.replace(notes=(*self.notes, *texts))


class Recovery(ABC):
    """Define one method of accuracy recovery.

    Attributes:
        name: name by which users and candidates refer to it.
        title: what it does, in a few words.
        stage: "model" replaces the float model by an equivalent one, "ranges" changes ranges or what is quantized,
            "artifact" edits the quantized file.
        free: True if the result has the same nodes and so costs no extra time on the device.
        order: position among the recoveries of its stage, the lowest first.
        searched: whether tuning tries it on its own.
        keeps_float: whether it leaves nodes in float. A repair for hardware without float does not try it.
        modes: modes of the schemes that it supports.
    """

    name: str
    title: str
    stage: Stage
    free: bool
    # After all recoveries of edgeq, whose positions are below this, unless a plug-in states its place.
    order = 100
    searched = True
    keeps_float = False
    modes: tuple[Mode, ...] = ("static",)

    @abstractmethod
    def apply(self, state: RecoveryState, samples: Samples, workdir: Path, progress: Progress) -> RecoveryState:
        """Apply the recovery and return the new state. If there is nothing to do, return `state` with a note.

        Args:
            samples: calibration samples.
            workdir: an empty folder for files that the new state refers to. All builds of one job have the same parent
                folder, in which they can share files.
        """
