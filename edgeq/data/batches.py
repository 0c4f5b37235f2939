"""A model with a fixed batch: rows of samples gathered, or split, into batches of that size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edgeq.data.fit import rows_of
from edgeq.data.sample import Sample
from edgeq.data.state import Array


def rebatch(samples: Iterable[Sample], size: int) -> Iterator[Sample]:
    """Samples of exactly `size` rows.

    A sample that has `size` rows passes unchanged, after the rows that wait before it. Others are cut into rows and
    gathered in order. The last batch repeats its last row until it is full; `context["valid"]` counts the real rows.
    Rows are gathered only with rows of equal scalars, which have no row of their own in a batch.
    A gathered sample (size above 1) has as label the tuple of its rows' labels and as `context["rows"]` their contexts.
    """
    waiting: list[Sample] = []
    for sample in samples:
        rows = rows_of(sample.inputs)
        if rows == size:
            if waiting:
                yield _gather(waiting, size)
                waiting = []
            yield sample
            continue
        for row in range(rows):
            inputs = {k: v[row : row + 1] if v.ndim else v for k, v in sample.inputs.items()}
            name = sample.name if rows == 1 else f"{sample.name} row {row}"
            if waiting and not _same_scalars(waiting[0].inputs, inputs):
                yield _gather(waiting, size)
                waiting = []
            waiting.append(replace(sample, name=name, inputs=inputs))
            if len(waiting) == size:
                yield _gather(waiting, size)
                waiting = []
    if waiting:
        yield _gather(waiting, size)


def batches(rows: int, size: int) -> int:
    """How many batches `rows` single rows make."""
    return -(-rows // size)


def _same_scalars(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return all(value.ndim or value == other[name] for name, value in one.items())


def _gather(rows: list[Sample], size: int) -> Sample:
    first = rows[0]
    if size == 1:
        return first
    full = rows + [rows[-1]] * (size - len(rows))
    inputs = {k: np.concatenate([row.inputs[k] for row in full]) if v.ndim else v for k, v in first.inputs.items()}
    labels: tuple[Any, ...] = tuple(row.label for row in rows)
    name = first.name if len(rows) == 1 else f"{first.name} … {rows[-1].name}"
    context = {"rows": tuple(row.context for row in rows), "valid": len(rows)}
    return replace(first, name=name, inputs=inputs, label=labels, context=context)
