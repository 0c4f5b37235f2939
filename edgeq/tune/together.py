"""Samples run at once, where a model answers to each of them as it does alone: of a small model most of the time is
spent between its inferences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgeq.data.samples import Sample
from edgeq.errors import DataError, RuntimeUnavailableError
from edgeq.measure.inference import Outputs, Session, infer

_MOST, _MOST_BYTES = 32, 2**22
# Kernels may add in another order; answers that depend on the other rows differ by more.
_ROUNDING = 1e-5


def answers(session: Session, samples: Sequence[Sample], *, model: str) -> list[Outputs]:
    """What a session answers to each sample, run at once if they are alike."""
    if len(samples) == 1 or not alike(samples):
        return [infer(session, sample, model=model) for sample in samples]
    made = infer(session, gathered(samples), model=model)
    return [{name: array[row : row + 1] for name, array in made.items()} for row in range(len(samples))]


def gathered(samples: Sequence[Sample]) -> Sample:
    """Samples of one row each as one."""
    inputs = {name: np.concatenate([s.inputs[name] for s in samples]) for name in samples[0].inputs}
    return dataclasses.replace(samples[0], inputs=inputs)


def joined(outputs: Sequence[Outputs]) -> Outputs:
    """The answers to samples of one row each as one."""
    return {name: np.concatenate([answer[name] for answer in outputs]) for name in outputs[0]}


def run_at_once(session: Any, samples: Sequence[Sample]) -> int:
    """How many samples that are like `samples` a session may run at once: 1 where its batch is fixed, where samples
    differ in shape, or where an answer depends on what is beside it, as with ranges that are measured at run time."""
    first = samples[0]
    free = all(len(spec.shape) > 0 and not isinstance(spec.shape[0], int) for spec in session.get_inputs())
    most = min(_MOST, _MOST_BYTES // max(1, sum(array.nbytes for array in first.inputs.values())))
    if most < 2 or len(samples) < 2 or not free or not alike(samples):
        return 1
    alone = [infer(session, sample) for sample in samples]
    try:
        beside = infer(session, gathered(samples))
    except (DataError, RuntimeUnavailableError):  # the batch is open at the inputs, and fixed further inside
        return 1
    right = all(
        len(array) == len(samples)
        and all(_close(array[row : row + 1], single[name]) for row, single in enumerate(alone))
        for name, array in beside.items()
    )
    return most if right else 1


def alike(samples: Sequence[Sample]) -> bool:
    """Whether samples are single rows of one shape, so that they can be run at once."""
    shapes = [{name: array.shape for name, array in sample.inputs.items()} for sample in samples]
    single = all(shape[:1] == (1,) for shape in shapes[0].values())
    return single and all(other == shapes[0] for other in shapes) and not any("rows" in s.context for s in samples)


def _close(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if one.shape != other.shape or one.dtype.kind not in "fiub":
        return False
    largest = float(np.abs(other[np.isfinite(other)]).max(initial=0.0)) if other.dtype.kind == "f" else 0.0
    return np.allclose(one, other, rtol=0, atol=_ROUNDING * largest, equal_nan=True)
