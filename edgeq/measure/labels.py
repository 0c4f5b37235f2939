"""What tasks ask of a sample and of a model's outputs, refused in one wording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import DataError, UsageError
from edgeq.measure.latency import Outputs

if TYPE_CHECKING:
    from edgeq.data.samples import Sample


def integer_labels(sample: Sample) -> NDArray[np.int64]:
    """The sample's labels, [rows]; one for a single label.

    Raises:
        DataError: no label, or one that is no integer.
    """
    if sample.label is None:
        raise DataError(f"{sample.name} has no label", "Give --labels, or compare with a --reference model instead")
    labels = np.asarray(sample.label).reshape(-1)
    if labels.dtype.kind not in "iub":
        raise DataError(f"{sample.name}: label {sample.label!r} is no class index", "Give integer labels")
    return labels.astype(np.int64)


def pick_output(outputs: Outputs, name: str | None, sample: Sample) -> NDArray[Any]:
    """The output of that name, or the only one, or the only one of floating point.

    Raises:
        UsageError: no such output, or several of floating point (or none) and no name.
    """
    if name is not None:
        if name not in outputs:
            raise UsageError(f"the model has no output {name!r}", f"It has {', '.join(sorted(outputs))}")
        return outputs[name]
    floats = {made: array for made, array in outputs.items() if array.dtype.kind == "f"}
    if len(outputs) != 1 and len(floats) == 1:
        return next(iter(floats.values()))
    if len(outputs) != 1:
        listed = ", ".join(sorted(outputs)) or "none that is an array"
        raise UsageError(
            f"{sample.name}: the model's outputs are {listed}",
            "Choose one with --task-output NAME",
        )
    return next(iter(outputs.values()))


def only_input(sample: Sample) -> NDArray[Any]:
    """The sample's only input.

    Raises:
        UsageError: the model takes several.
    """
    if len(sample.inputs) != 1:
        raise UsageError(
            f"{sample.name} has {len(sample.inputs)} inputs, this task takes one", "Write a task of your own"
        )
    return next(iter(sample.inputs.values()))
