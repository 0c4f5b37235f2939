"""The self-test of a bundle's variant: samples with the outputs that a device must come close to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.arrays import one_array
from edgeq_device.variants import SliceTolerance
from numpy.typing import NDArray

from edgeq.backends import Artifact
from edgeq.bundle.write import SelfTestCase
from edgeq.data.samples import Samples
from edgeq.emulate.check import EmulatedCheck
from edgeq.measure.inference import Session, infer
from edgeq.measure.slices import SliceSums
from edgeq.session import open_session
from edgeq.workers.engine import Engines

Array = NDArray[Any]

# Two architectures round differently: up to 1.6 % of an output's largest value was seen between x86 and ARM on the same
# integers (requantization and QLinearAdd). A wrong kernel, one that saturates, is off by far more.
_SELFTEST_TOLERANCE = 0.025
# A simulation rounds in places of its own, and so does the device: the difference of two independent noises has √2 of
# each one's RMS. Seen on an H100 in float16, at the largest: 1.6 times what the simulation differs from float32 by.
_SIMULATED = 2.0
# Of the largest value of a slice of another unit. What follows the integers there is often a Sigmoid or an Exp in
# float, which makes a rounding of its argument a change of several percent.
_SLICE_TOLERANCE = 0.1
_MOST_SLICES = 64
# From a multiple of the step, in steps: a float32 holds a multiple of 2^16 of them.
_OFF_GRID = 0.01


def selftest_cases(artifact: Artifact, samples: Samples, count: int) -> tuple[SelfTestCase, ...]:
    """The first `count` samples with what the artifact makes of them here, in its engine."""
    with Engines() as engines:
        session = engines.open(artifact.proof_model, artifact.proof_settings())
        return tuple(
            SelfTestCase(dict(sample.inputs), infer(session, sample)) for sample in itertools.islice(samples, count)
        )


@dataclass(frozen=True)
class SelfTestVectors:
    """The vectors, and the absolute differences that are allowed: on each output, and on its slices of another unit."""

    cases: tuple[SelfTestCase, ...]
    tolerance: Mapping[str, float]
    slices: Mapping[str, tuple[SliceTolerance, ...]]


def expected_outputs(
    cases: tuple[SelfTestCase, ...],
    check: EmulatedCheck | None,
    float_model: Path,
    *,
    native: bool,
    simulated: bool = False,
) -> SelfTestVectors:
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
    others: list[Mapping[str, Array]] = [case.outputs for case in cases]
    if not native and not (check is not None and check.answers):
        session = open_session(float_model)
        others = [_answers(session, case) for case in cases]
    factor = _SIMULATED if simulated else 1.0
    tolerance, slices = {}, {}
    for name in dict.fromkeys(name for case in cases for name in case.outputs):
        pairs = [(case, other[name]) for case, other in zip(cases, others, strict=True) if name in case.outputs]
        tolerance[name], parts = _allowed(name, pairs, factor)
        if parts:
            slices[name] = parts
    return SelfTestVectors(cases, tolerance, slices)


def _answers(session: Session, case: SelfTestCase) -> dict[str, Array]:
    names = list(case.outputs)
    return dict(zip(names, map(one_array, session.run(names, dict(case.inputs))), strict=True))


def _allowed(
    name: str, pairs: Sequence[tuple[SelfTestCase, Array]], factor: float
) -> tuple[float, tuple[SliceTolerance, ...]]:
    """Return what an output may differ by, and its slices: a share of its size, or `factor` times its distance from the
    other answers."""
    if any(case.outputs[name].dtype.kind != "f" for case, _ in pairs):
        return 0.0, ()
    sums, largest, changed = SliceSums(), 0.0, 0.0
    for case, other in pairs:
        expected = case.outputs[name].astype(np.float64)
        other = other if other.shape == expected.shape else expected
        largest = max(largest, float(np.abs(expected).max(initial=0.0)))
        changed = max(changed, float(np.abs(other - expected).max(initial=0.0)))
        sums.update(expected, other.astype(np.float64), case.inputs.values())
    whole = max(_SELFTEST_TOLERANCE * largest, factor * changed)
    step = 2 * _step(np.concatenate([case.outputs[name].ravel() for case, _ in pairs]))
    parts = ((part, max(_SLICE_TOLERANCE * part.peak, factor * part.max_abs_error, step)) for part in sums.result())
    kept = (SliceTolerance(p.axis, p.first, p.last, allowed) for p, allowed in parts if allowed < whole)
    strictest = sorted(kept, key=lambda part: part.tolerance)[:_MOST_SLICES]
    return whole, tuple(sorted(strictest, key=lambda part: (part.axis, part.first)))


def _step(values: Array) -> float:
    """Return the step of the grid on which all values lie, as they do where one scale quantizes the output; else 0."""
    known = np.unique(values.astype(np.float64))
    step = float(np.diff(known).min()) if len(known) > 1 else 0.0
    on_grid = step > 0 and bool(np.all(np.abs(known / step - np.rint(known / step)) < _OFF_GRID))
    return step if on_grid else 0.0
