"""The self-test of a bundle's variant: samples with the outputs that a device must come close to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgeq.backends import Artifact
from edgeq.bundle.write import SelfTestCase
from edgeq.data.samples import Samples
from edgeq.emulate.check import EmulatedCheck
from edgeq.session import open_session
from edgeq.workers.engine import Engines

# Two architectures round differently: up to 1.6 % of an output's largest value was seen between x86 and ARM on the same
# integers (requantization and QLinearAdd). A wrong kernel, one that saturates, is off by far more.
_SELFTEST_TOLERANCE = 0.025
# A simulation rounds in places of its own, and so does the device: the difference of two independent noises has √2 of
# each one's RMS. Seen on an H100 in float16, at the largest: 1.6 times what the simulation differs from float32 by.
_SIMULATED = 2.0


def selftest_cases(artifact: Artifact, samples: Samples, count: int) -> tuple[SelfTestCase, ...]:
    """The first `count` samples with what the artifact makes of them here, in its engine."""
    with Engines() as engines:
        session = engines.open(artifact.proof_model, artifact.proof_settings())
        names = [output.name for output in session.get_outputs()]
        return tuple(
            SelfTestCase(dict(sample.inputs), dict(zip(names, session.run(None, dict(sample.inputs)), strict=True)))
            for sample in itertools.islice(samples, count)
        )


def expected_outputs(
    cases: tuple[SelfTestCase, ...],
    check: EmulatedCheck | None,
    float_model: Path,
    *,
    native: bool,
    simulated: bool = False,
) -> tuple[tuple[SelfTestCase, ...], dict[str, float]]:
    """The vectors, made of what this machine answers, and what each output may differ by on the device.

    The outputs are the target's own where they could be computed there. Else they are this machine's, and the
    target's may differ by as much as quantization itself changed them: roundings differ between architectures, and a
    network spreads them as it spreads those.

    Args:
        check: on the target's own kernels; None where none was made.
        float_model: the model that was quantized.
        native: whether this machine's kernels are the target's.
        simulated: whether the vectors are those of a simulation that rounds elsewhere than the device.
    """
    if check is not None and check.answers:
        cases = tuple(SelfTestCase(c.inputs, answer) for c, answer in zip(cases, check.answers, strict=True))
    allowed = tolerance(cases)
    if native or (check is not None and check.answers):
        return cases, allowed
    factor = _SIMULATED if simulated else 1.0
    session = open_session(float_model)
    for case in cases:
        names = list(case.outputs)
        for name, value in zip(names, session.run(names, dict(case.inputs)), strict=True):
            if value.dtype.kind == "f":
                changed = float(np.max(np.abs(value - case.outputs[name]), initial=0.0))
                allowed[name] = max(allowed[name], factor * changed)
    return cases, allowed


def tolerance(cases: Sequence[SelfTestCase]) -> dict[str, float]:
    """Per output, the absolute difference that rounding alone may make."""
    largest: dict[str, float] = {}
    for case in cases:
        for name, value in case.outputs.items():
            magnitude = float(np.max(np.abs(value), initial=0.0)) if value.dtype.kind == "f" else 0.0
            largest[name] = max(largest.get(name, 0.0), magnitude)
    return {name: _SELFTEST_TOLERANCE * magnitude for name, magnitude in largest.items()}
