"""Another calibration method, where the statistics promise at most half of the noise."""

from __future__ import annotations

from edgeq.calibrate.ranges import range_noise, scheme_ranges
from edgeq.model.quant_params import grid_of
from edgeq.prove.checks import Case
from edgeq.prove.job import Built, build
from edgeq.scheme import Scheme

LEAST_SQUARES = "mse"
"""The method of the least squared error, by which ranges are compared here."""
_WORTH = 2.0


class Method:
    name = "method"
    title = "ranges of the least squared error"
    order = 10

    def options(self, case: Case) -> tuple[str, ...]:
        """See `Improvement.options`."""
        scheme, statistics = case.scheme, case.job.statistics
        if scheme.mode != "static" or scheme.method == LEAST_SQUARES or statistics is None:
            return ()
        grid = grid_of(scheme.activation_type, scheme.activation_symmetric)
        now, best = (
            sum(range_noise(statistics, ranges, grid).values())
            for ranges in (scheme_ranges(statistics, scheme), scheme_ranges(statistics, _with(scheme)))
        )
        return (f"--method {LEAST_SQUARES}",) if now >= _WORTH * best else ()

    def inferences(self, case: Case) -> int:
        """See `Improvement.inferences`."""
        del case
        return 0

    def build(self, case: Case, option: str) -> tuple[str, Built]:
        """See `Improvement.build`."""
        return option, build(case.job, case.built.target, _with(case.scheme), case.place() / "model.onnx")


def _with(scheme: Scheme) -> Scheme:
    return scheme.replace(method=LEAST_SQUARES, method_options={})


IMPROVEMENT = Method()
