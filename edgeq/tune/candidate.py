"""One way to deploy the model, as a value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from edgeq.scheme import Scheme


@dataclass(frozen=True)
class Candidate:
    """What tuning builds and measures.

    Attributes:
        name: short, unique in a run, the same in every run on the same input.
        scheme: how to quantize.
        recoveries: names of accuracy recoveries, in the order in which they are applied.
        threads: inside an operator; 0 lets ONNX Runtime take all cores.
        builder: what builds it: "" is the target's backend; else a name in `edgeq.tune.builders`.
    """

    name: str
    scheme: Scheme
    recoveries: tuple[str, ...] = ()
    threads: int = 0
    builder: str = ""

    def replace(self, **changes: Any) -> Candidate:
        """A copy with `changes`."""
        return dataclasses.replace(self, **changes)
