"""Batches gathered for a model of fixed batch size, taken apart again: a task sees one item at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgeq.errors import DataError
from edgeq.measure.inference import Outputs

if TYPE_CHECKING:
    from edgeq.data.samples import Sample


def rows(sample: Sample, outputs: dict[str, Outputs]) -> Iterator[tuple[Sample, dict[str, Outputs]]]:
    """The real rows of a gathered batch, each as a sample with a batch of 1; any other sample as it is.

    Args:
        sample: gathered if its context has "rows": the contexts of the real rows, which come first.
        outputs: of each session.

    Raises:
        DataError: an output's first axis does not count the rows.
    """
    contexts = sample.context.get("rows")
    if contexts is None:
        yield sample, outputs
        return
    size = len(next(iter(sample.inputs.values())))
    for made in outputs.values():
        for name, array in made.items():
            if array.ndim == 0 or len(array) != size:
                raise DataError(
                    f"{sample.name}: a batch of {size}, but output {name!r} has shape {list(array.shape)}",
                    "Export the model with a free batch or a batch of 1",
                )
    for row, context in enumerate(contexts):
        one = slice(row, row + 1)
        yield (
            dataclasses.replace(
                sample,
                name=f"{sample.name}, row {row}",
                inputs={name: array[one] if array.ndim else array for name, array in sample.inputs.items()},
                label=sample.label[row] if sample.label is not None else None,
                context=context,
            ),
            {session: {name: array[one] for name, array in made.items()} for session, made in outputs.items()},
        )
