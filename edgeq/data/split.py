"""Decide what the first axis means in stored arrays that are already prepared: samples, or the model's own batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edgeq.data.fit import Shape, find_misfit, find_missing_step, fits
from edgeq.errors import DataError
from edgeq.signature import Signature, TensorSpec

Kind = Literal["whole", "rows", "items", "single"]


@dataclass(frozen=True)
class SplitPlan:
    """Describe how a file of prepared arrays splits into samples.

    Attributes:
        kind: "whole": the arrays are one sample as they are; "rows": each slice of the first axis is one sample, with
            that axis kept as a batch of 1; "items": each slice is a complete sample, batch included; "single": one
            sample that lacks the batch axis.
        count: number of samples in the file.
        one_row: whether a sample is one row of the batch.
    """

    kind: Kind
    count: int
    one_row: bool


def plan_prepared(
    shapes: Mapping[str, Shape], signature: Signature, location: str, stack: bool | None = None
) -> SplitPlan:
    """Decide what the first axis means in stored arrays that are already preprocessed.

    If arrays have exactly the model's shape, they are one sample, unless the first axis is symbolic in the model. If it
    is symbolic, every row is a sample. `stack` overrides this rule: with True, the first axis counts samples; with
    False, it does not. An array without axes belongs to every sample.

    Raises:
        DataError: no interpretation fits (the message names the first input whose array does not fit), or an array is
            empty.
    """
    # If there are several inputs, one of them may be empty, such as the cache of a decoder before its first step.
    if all(0 in shape for shape in shapes.values()) or any(shape[:1] == (0,) for shape in shapes.values()):
        raise DataError(f"{location} holds an empty array", "Leave the file out")
    specs = {spec.name: spec for spec in signature.inputs}
    leads = {shape[0] for shape in shapes.values() if shape}
    lead = next(iter(leads)) if len(leads) == 1 else None
    fits_whole = fits(shapes, signature)
    rows = lead is not None and fits(
        {name: shape and (1, *shape[1:]) for name, shape in shapes.items()}, signature, free_batch=True
    )
    # A symbolic first axis means that the exporter left the batch open, so the stored rows are samples.
    symbolic = all(specs[name].shape is not None and not _has_fixed_lead(specs[name]) for name in shapes)
    # The order of these tests is the order of trust: an exact match of all sizes says the most.
    if fits_whole and stack is not True and not (rows and symbolic and stack is None):
        return SplitPlan("whole", 1, lead == 1 or not leads)
    if rows and stack is not False:
        assert lead is not None
        return SplitPlan("rows", lead, True)
    # Some tools stack complete inputs, so that the array has one axis more than the model.
    if lead is not None and stack is not False:
        inner = {name: shape[1:] for name, shape in shapes.items()}
        if fits(inner, signature):
            return SplitPlan("items", lead, all(shape[:1] in ((1,), ()) for shape in inner.values()))
    # One item without the batch axis, as a camera or a dataset returns it.
    single = {name: shape if specs[name].shape == () else (1, *shape) for name, shape in shapes.items()}
    if stack is not True and fits(single, signature, free_batch=True):
        return SplitPlan("single", 1, True)
    unstacked = {name: shape[1:] for name, shape in shapes.items()}
    # Without this test, the message would blame a shape, although only the numbers of samples differ.
    if len(leads) > 1 and (fits(shapes, signature, free_batch=True) or fits(unstacked, signature)):
        raise DataError(
            f"{location}: the arrays disagree on the number of samples "
            f"({', '.join(f'{name} {list(shape)}' for name, shape in shapes.items())})",
            f"Store the same number for every input, in shapes that fit {_join_inputs(signature)}",
        )
    added = find_missing_step({name: shape[1:] for name, shape in shapes.items()}, signature)
    raise DataError(
        f"{location}: {find_misfit(shapes, signature)}",
        "Store the model's shape, or name a ⟨preprocess⟩" + (f" with {added} in it" if added else ""),
    )


def _has_fixed_lead(spec: TensorSpec) -> bool:
    return bool(spec.shape) and isinstance(spec.shape[0], int)  # type: ignore[index]


def _join_inputs(signature: Signature) -> str:
    return "; ".join(str(spec) for spec in signature.inputs)
