"""One way to deploy the model, as a value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from edgeq.engines import DEFAULT, EngineChoice
from edgeq.scheme import Scheme


@dataclass(frozen=True)
class Candidate:
    """What tuning builds and measures.

    Attributes:
        name: short, unique in a run, the same in every run on the same input.
        scheme: how to quantize.
        recoveries: names of accuracy recoveries, in the order in which they are applied.
        threads: inside an operator; 0 lets ONNX Runtime take all cores.
        builder: what builds it: "" is the target's backend; "sequence" is `edgeq.tune.sequence`.
        engine: what runs it; None is onnxruntime's own kernels.
    """

    name: str
    scheme: Scheme
    recoveries: tuple[str, ...] = ()
    threads: int = 0
    builder: str = ""
    engine: EngineChoice | None = None

    @property
    def quantized(self) -> bool:
        """Whether it is not simply the float model, in an engine that runs it faster."""
        return self.scheme.mode != "float"

    def replace(self, **changes: Any) -> Candidate:
        """A copy with `changes`."""
        return dataclasses.replace(self, **changes)


def engine_name(candidate: Candidate) -> str:
    """Of what runs it."""
    return candidate.engine.engine.name if candidate.engine else DEFAULT
