"""Each accuracy recovery by itself."""

from __future__ import annotations

from edgeq.prove.checks import Case
from edgeq.prove.job import Built
from edgeq.tune.recover.methods import recoveries
from edgeq.tune.recover.run import Recoverer, ineffective

_OPTION = "--recover "


class Recovery:
    name = "recovery"
    title = "an accuracy recovery"
    order = 30

    def options(self, case: Case) -> tuple[str, ...]:
        """See `Improvement.options`."""
        if case.job.calibration is None:
            return ()
        vain = ineffective(case.built.target)
        fitting = (name for name, found in recoveries().items() if case.scheme.mode in found.modes)
        return tuple(f"{_OPTION}{name}" for name in fitting if name not in vain)

    def inferences(self, case: Case) -> int:
        """See `Improvement.inferences`."""
        return 3 * len(case.job.validation)  # statistics of a new model, and values of layers in the middle

    def build(self, case: Case, option: str) -> tuple[str, Built]:
        """See `Improvement.build`."""
        place = case.place()
        recoverer = Recoverer(case.job, case.built.target, place)
        return option, recoverer.build(case.scheme, [option.removeprefix(_OPTION)], place / "model.onnx")


IMPROVEMENT = Recovery()
