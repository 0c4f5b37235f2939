"""What a comparison found: two sides, how their answers agree, how fast they are, and which limits hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeq.display import Page
from edgeq.errors import CheckFailedError
from edgeq.measure.accuracy import Accuracy
from edgeq.measure.agreement import Agreement
from edgeq.measure.latency import Measurement
from edgeq.records import plain
from edgeq.report.compare_limits import Limits, missed
from edgeq.report.compare_text import comparison_rows, sentences
from edgeq.signature import Signature

A, B = "A", "B"


@dataclass(frozen=True)
class Side:
    """What is known of one of the two: `bytes` of its model file with external data, int8 share of its MACs, and
    whether any operator is quantized."""

    path: Path
    variant: str | None
    bytes: int | None
    digest: str | None
    signature: Signature
    coverage: Mapping[str, Any] | None
    accuracy: Accuracy | None
    quantized: bool = False

    def same_as(self, other: Side) -> bool:
        """Whether both are the same bytes, run the same way."""
        return self.digest is not None and (self.digest, self.variant) == (other.digest, other.variant)

    def __record__(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "variant": self.variant,
            "bytes": self.bytes,
            "sha256": self.digest,
            "inputs": [str(spec) for spec in self.signature.inputs],
            "outputs": [str(spec) for spec in self.signature.outputs],
            "coverage": self.coverage,
            "accuracy": self.accuracy,
        }


@dataclass(frozen=True)
class Comparison(Page):
    """What was found; `agreement` is B's with A."""

    a: Side
    b: Side
    signature_differences: tuple[str, ...]
    samples: int
    agreement: Agreement | None
    measurement: Measurement | None
    notes: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)

    @property
    def same(self) -> bool:
        """Whether there is nothing to compare: the same bytes, run the same way."""
        return self.a.same_as(self.b)

    @property
    def debuggable(self) -> tuple[Side, Side] | None:
        """The float model file and the quantized form that `edgeq debug` can compare, in this order; None where A and B
        are not one of each."""
        found = next(((a, b) for a, b in ((self.a, self.b), (self.b, self.a)) if b.quantized and not a.quantized), None)
        return found if found is not None and found[0].variant is None else None

    def rows(self) -> list[tuple[str, str, str, str]]:
        """The table: what, A, B, B against A."""
        return comparison_rows(self.figures())

    def missed(self) -> tuple[str, ...]:
        """A sentence for each limit that was not shown to hold."""
        return missed(self.figures(), self.limits)

    def check(self) -> None:
        """Raise CheckFailedError where a limit was not shown to hold."""
        if found := self.missed():
            raise CheckFailedError("; ".join(found), "Keep A, or see `edgeq debug` and `edgeq bench` for what costs it")

    def verdict(self) -> tuple[str, ...]:
        """What it comes to, the most important first."""
        return sentences(self.figures())

    def __brief__(self) -> dict[str, Any]:
        return {"a": self.a.path, "b": self.b.path, "samples": self.samples, "verdict": " ".join(self.verdict())}

    def __page__(self) -> dict[str, Any]:
        timed = self.measurement.notes if self.measurement is not None else ()  # they stand beside the latencies
        return {
            "name": f"{self.a.path.name} and {self.b.path.name}",
            "bench": plain(self.measurement) if self.measurement is not None else None,
            "tables": [(" ".join(self.verdict()), ("", "A", "B", "B against A"), self.rows())],
            "notes": [*self.signature_differences, *(note for note in self.notes if note not in timed)],
        }

    def __record__(self) -> dict[str, Any]:
        return {**self.figures(), "verdict": self.verdict(), "limits": self.limits, "missed": self.missed()}

    def figures(self) -> dict[str, Any]:
        """All that was measured, plain values."""
        latency = None
        if self.measurement is not None:
            latency = {
                A: dict(self.measurement.latency(A)),
                B: dict(self.measurement.latency(B)),
                "ratio": dict(self.measurement.ratio(B)),
            }
        found: dict[str, Any] = plain(
            {
                "a": self.a,
                "b": self.b,
                "same": self.same,
                "signature_differences": self.signature_differences,
                "samples": self.samples,
                "agreement": self.agreement,
                "latency": latency,
                "bench": self.measurement,
                "notes": self.notes,
            }
        )
        return found
