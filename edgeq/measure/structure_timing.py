"""Hold what is known about the latency of a model's structure, relative to float32 in the same series of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgeq_device.measure.claim import UNKNOWN, Claim


@dataclass(frozen=True)
class StructureTiming:
    """Hold the latency of one structure with one number of threads, in milliseconds, and its ratio to the best latency
    of float32.

    Attributes:
        latency: figures of the undisturbed runs, or of all runs if every run was disturbed: count, min_ms, p50_ms,
            p90_ms, p99_ms, p999_ms, max_ms, mean_ms, cv, samples_per_s.
        speedup: the claim that can be made about the speed against float32, timed in the same series of runs; None for
            float32 itself.
        float_ms: the median latency of float32 in that series; None for float32 itself.
    """

    latency: Mapping[str, float]
    speedup: Claim | None = None
    float_ms: float | None = None

    @property
    def verdict(self) -> str:
        """Return the verdict on the candidate's speed against float32, or "unknown" if the two were not timed against
        each other.
        """
        return self.speedup.verdict if self.speedup is not None else UNKNOWN

    @property
    def share(self) -> float:
        """Return the median latency divided by that of float32 in the same series of runs. If this ratio cannot be
        claimed, return its estimate. Return 1 if there is no timing against float32.
        """
        about = self.speedup.estimated if self.speedup is not None else None
        if about is not None:
            return 1 / about[0]
        return self.latency["p50_ms"] / self.float_ms if self.float_ms else 1.0
