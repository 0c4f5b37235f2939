"""Make timings independent of the machine's load: every session runs, but its latency is made up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from edgeq_device.measure.claim import rank_until_settled
from edgeq_device.measure.latency import Burst, Bursts
from edgeq_device.measure.load import CompetingLoad

from edgeq.tuning import clock as clocks
from edgeq.tuning.trials import FLOAT


class SteadyRunner:
    """Take two milliseconds for float32 and one for everything else, with a little spread."""

    def __init__(self, name: str, run: Any) -> None:
        self._run = run
        self._seconds = 2e-3 if name.startswith(FLOAT) else 1e-3
        self._random = np.random.default_rng(0)

    def __call__(self) -> None:
        self._run()

    def burst(self, bursts: Bursts, slow: bool) -> Burst:
        self._run()
        samples = self._seconds * (1 + 0.01 * self._random.random(8))
        return Burst(list(samples), float(samples.sum()), np.zeros(8, bool))


@contextmanager
def steady_timings() -> Iterator[None]:
    """Run `edgeq tune` as on an undisturbed machine, even if other tests keep this one busy."""

    def steady(runners: Mapping[str, Any], *rules: Any, **options: Any) -> Any:
        made = {name: [SteadyRunner(name, run) for run in several] for name, several in runners.items()}
        return rank_until_settled(made, *rules, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "rank_until_settled", steady)
        patch.setattr(CompetingLoad, "measure_busy", lambda self: 0.0)
        yield
