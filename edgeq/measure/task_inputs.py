"""Read what a task needs of a sample and its outputs: labels, one output, the only input. Say so if it is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
from edgeq_device.answers.rows import SIZE_INPUTS
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.errors import DataError, UsageError
from edgeq.measure.inference import Outputs


def read_integer_labels(sample: Sample) -> NDArray[np.int64]:
    """Return the sample's labels, [rows]. A single label gives one row.

    Raises:
        DataError: the sample has no label, or a label is not an integer.
    """
    if sample.label is None:
        raise DataError(f"{sample.name} has no label", "Give ⟨labels⟩, or compare with a ⟨reference⟩ model instead")
    labels = np.asarray(sample.label).reshape(-1)
    # Labels in float belong to another task. Rounding them would hide this.
    if labels.dtype.kind not in "iub":
        raise DataError(f"{sample.name}: label {sample.label!r} is not a class index", "Give integer labels")
    return labels.astype(np.int64)


def pick_output(outputs: Outputs, name: str | None, sample: Sample) -> NDArray[Any]:
    """Return the output called `name`. Without a name, return the only output, or else the only floating-point output.

    Raises:
        UsageError: no output has the name, or no name is given and there is not exactly one floating-point output.
    """
    if name is not None:
        if name not in outputs:
            raise UsageError(f"the model has no output {name!r}", f"It has {', '.join(sorted(outputs))}")
        return outputs[name]
    # Beside scores, models often return integers such as an index or a count.
    floats = {output_name: array for output_name, array in outputs.items() if array.dtype.kind == "f"}
    if len(outputs) != 1 and len(floats) == 1:
        return next(iter(floats.values()))
    if len(outputs) != 1:
        listed = ", ".join(sorted(outputs)) or "none that is an array"
        raise UsageError(
            f"{sample.name}: the model's outputs are {listed}",
            "Choose one with ⟨task_output⟩ NAME",
        )
    return next(iter(outputs.values()))


def pick_input(sample: Sample) -> NDArray[Any]:
    """Return the sample's only input, apart from those for the size of an image.

    Raises:
        UsageError: the model has several inputs.
    """
    arrays = sample.inputs
    inputs = [array for name, array in arrays.items() if name not in SIZE_INPUTS or len(arrays) == 1]
    if len(inputs) != 1:
        raise UsageError(
            f"{sample.name} has {len(sample.inputs)} inputs, but this task takes one", "Write a task of your own"
        )
    return inputs[0]
