"""The layers that lose most, kept in float until the outputs are healthy."""

from __future__ import annotations

import math

from edgeq.errors import CheckFailedError
from edgeq.measure.agreement import HEALTHY_DB
from edgeq.prove.checks import Case
from edgeq.prove.job import Built
from edgeq.tune.recover.closer import Search
from edgeq.tune.recover.costs import SAMPLES, find_units
from edgeq.tune.recover.run import Recoverer

# Sets of layers that a search builds, about.
_BUILDS = 12
# Multiply-accumulates above which the noise of layers is followed on one sample.
_LARGE = 100_000_000


class FloatLayers:
    name = "float-layers"
    title = "the layers that lose most in float"
    order = 40

    def options(self, case: Case) -> tuple[str, ...]:
        """See `Improvement.options`."""
        static = case.scheme.mode == "static" and case.job.calibration is not None
        return (f"--min-sqnr {HEALTHY_DB:g}",) if static else ()

    def inferences(self, case: Case) -> int:
        """See `Improvement.inferences`."""
        return len(find_units(case.job.prepared.model)) * _followed(case) + _BUILDS * len(case.job.validation)

    def build(self, case: Case, option: str) -> tuple[str, Built]:
        """See `Improvement.build`."""
        place = case.place()
        recoverer = Recoverer(case.job, case.built.target, place)
        search = Search(recoverer, case.job, case.scheme, timed=False, followed=_followed(case))
        nodes = search.reach(HEALTHY_DB, refinements=0)
        if nodes is None:
            nodes, best = search.best
            if not math.isfinite(best):
                raise CheckFailedError("no layers in float make the outputs finite")
            option = f"--min-sqnr {math.floor(10 * best) / 10:g}"
        return option, recoverer.build(search.in_float(nodes), (), place / "model.onnx")


def _followed(case: Case) -> int:
    return SAMPLES if case.macs <= _LARGE else 1


IMPROVEMENT = FloatLayers()
