"""Another mode of quantization: scales of activations measured at run time, or weights in blocks of more bits."""

from __future__ import annotations

import dataclasses

from edgeq.backends.base import backend_named
from edgeq.errors import UsageError
from edgeq.prove.checks import Case, int8_share
from edgeq.prove.job import Built, build
from edgeq.scheme import Scheme

# Of the work in int8, another mode must have so much of what this one has: it quantizes fewer operators.
_LEAST = 0.5


class Mode:
    name = "mode"
    title = "ranges measured at run time, or weights of 8 bits"
    order = 20

    def options(self, case: Case) -> tuple[str, ...]:
        """See `Improvement.options`."""
        backend, now = backend_named(case.built.target.backend), int8_share(case.job, case.built)
        suits = []
        for option, scheme in _schemes(case.scheme).items():
            try:
                backend.check(scheme)
            except UsageError:  # the backend has no such mode
                continue
            artifact = dataclasses.replace(case.built.artifact, scheme=scheme, coverage=None)
            if int8_share(case.job, dataclasses.replace(case.built, artifact=artifact)) >= _LEAST * now:
                suits.append(option)
        return tuple(suits)

    def inferences(self, case: Case) -> int:
        """See `Improvement.inferences`."""
        del case
        return 0

    def build(self, case: Case, option: str) -> tuple[str, Built]:
        """See `Improvement.build`."""
        scheme = _schemes(case.scheme)[option]
        return option, build(case.job, case.built.target, scheme, case.place() / "model.onnx")


def _schemes(scheme: Scheme) -> dict[str, Scheme]:
    """Return the scheme of each option, by the text to type."""
    dynamic = {"--dynamic": scheme.replace(mode="dynamic")} if scheme.mode == "static" else {}
    fewer = scheme.mode == "dynamic" or (scheme.mode == "weight-only" and scheme.weight_bits < 8)
    return {**dynamic, **({"--weight-only 8": scheme.replace(mode="weight-only", weight_bits=8)} if fewer else {})}


IMPROVEMENT = Mode()
