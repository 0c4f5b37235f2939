"""Run several samples in one batch, if that does not change their outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgeq.data.sample import Sample
from edgeq.errors import DataError, RuntimeUnavailableError
from edgeq.measure.inference import Outputs, Session, infer

_MAX_BATCH, _MAX_BATCH_BYTES = 32, 2**22
# Kernels may add in another order for a batch, which changes outputs slightly. A larger difference than this means that
# a sample's outputs depend on the other rows.
_ROUNDING = 1e-5


def infer_all(session: Session, samples: Sequence[Sample], *, model: str) -> list[Outputs]:
    """Return a session's outputs for each sample. If the samples are alike, they run together as one batch."""
    if len(samples) == 1 or not can_batch(samples):
        return [infer(session, sample, model=model) for sample in samples]
    outputs = infer(session, join_samples(samples), model=model)
    return [{name: array[row : row + 1] for name, array in outputs.items()} for row in range(len(samples))]


def join_samples(samples: Sequence[Sample]) -> Sample:
    """Join single-row samples into one sample with all the rows."""
    inputs = {name: np.concatenate([s.inputs[name] for s in samples]) for name in samples[0].inputs}
    return dataclasses.replace(samples[0], inputs=inputs)


def join_outputs(outputs: Sequence[Outputs]) -> Outputs:
    """Join the outputs of single-row samples into outputs with all the rows."""
    return {name: np.concatenate([answer[name] for answer in outputs]) for name in outputs[0]}


def find_batch_size(session: Any, samples: Sequence[Sample]) -> int:
    """Return how many samples like `samples` a session may run in one batch.

    Return 1 if the session's batch size is fixed, or if the samples differ in shape. Also return 1 if a sample's
    outputs depend on the other rows of a batch, as they do if ranges are measured at run time.
    """
    example = samples[0]
    free = all(len(spec.shape) > 0 and not isinstance(spec.shape[0], int) for spec in session.get_inputs())
    limit = min(_MAX_BATCH, _MAX_BATCH_BYTES // max(1, sum(array.nbytes for array in example.inputs.values())))
    if limit < 2 or len(samples) < 2 or not free or not can_batch(samples):
        return 1
    alone = [infer(session, sample) for sample in samples]
    try:
        batched = infer(session, join_samples(samples))
    except (DataError, RuntimeUnavailableError):  # the batch size is free at the inputs, but fixed inside the model
        return 1
    unchanged = all(
        len(array) == len(samples)
        and all(_is_close(array[row : row + 1], single[name]) for row, single in enumerate(alone))
        for name, array in batched.items()
    )
    return limit if unchanged else 1


def can_batch(samples: Sequence[Sample]) -> bool:
    """Return whether samples are single rows of the same shape, so that they can run in one batch."""
    shapes = [{name: array.shape for name, array in sample.inputs.items()} for sample in samples]
    single = all(shape[:1] == (1,) for shape in shapes[0].values())
    return single and all(sizes == shapes[0] for sizes in shapes) and not any("rows" in s.context for s in samples)


def _is_close(batched: np.ndarray[Any, Any], single: np.ndarray[Any, Any]) -> bool:
    if batched.shape != single.shape or batched.dtype.kind not in "fiub":
        return False
    largest = float(np.abs(single[np.isfinite(single)]).max(initial=0.0)) if single.dtype.kind == "f" else 0.0
    return np.allclose(batched, single, rtol=0, atol=_ROUNDING * largest, equal_nan=True)
