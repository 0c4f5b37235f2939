"""Define the interface of a recovery: a function from the state of a build to a better one."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgeq.backends.base import Artifact
from edgeq.calibrate.ranges import Range
from edgeq.calibrate.statistics import Statistics
from edgeq.data.samples import Samples
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import Mode, Scheme
from edgeq.util.display import Progress

Stage = Literal["model", "ranges", "artifact"]


@dataclass(frozen=True)
class State:
    """Hold everything that a recovery may read and replace.

    Attributes:
        prepared: the float model that is quantized. A "model" recovery puts an equivalent one in its place.
        statistics: of `prepared`, on the calibration samples; None where the scheme is not static.
        ranges: by tensor; before ranges are derived, only those that a model recovery has fixed.
        scheme: how it is quantized. A "ranges" recovery may add to `exclude`.
        changed: names of the layers that "model" recoveries changed, in vain where they stay in float.
        artifact: what was built; None before.
        notes: one sentence for each change.
    """

    prepared: PreparedModel
    statistics: Statistics | None
    ranges: Mapping[str, Range]
    scheme: Scheme
    artifact: Artifact | None = None
    notes: tuple[str, ...] = ()
    changed: frozenset[str] = frozenset()

    def replace(self, **changes: Any) -> State:
        """Return a copy with `changes`."""
        return dataclasses.replace(self, **changes)

    def note(self, *texts: str) -> State:
        """Return a copy with further notes."""
        return self.replace(notes=(*self.notes, *texts))


class Recovery(ABC):
    """Define one method of accuracy recovery.

    Attributes:
        name: as users and candidates name it.
        title: what it does, a few words.
        stage: "model" replaces the float model by an equivalent one, "ranges" changes ranges or what is quantized,
            "artifact" edits the quantized file.
        free: whether the result has the same nodes, so that it costs no time on the device.
        order: place among the recoveries of its stage, the lowest first.
        replaces: name of the recovery that is needless next to this one, which does the same and more.
        slow: whether it runs the quantized model layer by layer; a repair tries it last.
        searched: whether tuning tries it by itself.
        modes: of the schemes that it goes with.
    """

    name: str
    title: str
    stage: Stage
    free: bool
    order = 100
    replaces: str = ""
    slow = False
    searched = True
    modes: tuple[Mode, ...] = ("static",)

    @abstractmethod
    def apply(self, state: State, samples: Samples, workdir: Path, progress: Progress) -> State:
        """Return the state after it; the state as it was, with a note, where there is nothing to do.

        Args:
            samples: calibration samples.
            workdir: an empty folder for files that the new state refers to. Its parent is the same for all builds of
                one job, for what they can share.
        """
