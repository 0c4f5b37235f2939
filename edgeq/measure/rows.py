"""Split a gathered batch into its rows, so that each row counts as a sample with a label of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.inference import Outputs


def split_rows(sample: Sample, outputs: dict[str, Outputs]) -> Iterator[tuple[Sample, dict[str, Outputs]]]:
    """Yield each real row of a gathered batch as a sample with a batch of 1. Yield any other sample unchanged.

    Args:
        sample: a sample. It is gathered if its context has the key "rows", with the contexts of the real rows. The real
            rows come first in the batch.
        outputs: outputs of each session.

    Raises:
        DataError: the first axis of an output is not as long as the batch.
    """
    contexts = sample.context.get("rows")
    if contexts is None:
        yield sample, outputs
        return
    size = len(next(iter(sample.inputs.values())))
    for session_outputs in outputs.values():
        for name, array in session_outputs.items():
            # Only an output with an entry for each row can be split.
            if array.ndim == 0 or len(array) != size:
                raise DataError(
                    f"{sample.name}: a batch of {size}, but output {name!r} has shape {list(array.shape)}",
                    "Export the model with a free batch or a batch of 1",
                )
    for row, context in enumerate(contexts):
        # A slice keeps the axis of the batch, which tasks and comparisons expect.
        row_slice = slice(row, row + 1)
        yield (
            dataclasses.replace(
                sample,
                name=f"{sample.name}, row {row}",
                inputs={name: array[row_slice] if array.ndim else array for name, array in sample.inputs.items()},
                label=sample.label[row] if sample.label is not None else None,
                context=context,
            ),
            {
                session: {name: array[row_slice] for name, array in session_outputs.items()}
                for session, session_outputs in outputs.items()
            },
        )
