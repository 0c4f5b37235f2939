"""Fit arrays to a model's signature: dtypes, shapes and finite values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.data.images import Array
from edgeq.data.limits import check_size
from edgeq.errors import DataError
from edgeq.signature import Dimension, Signature, TensorSpec

Shape = tuple[int, ...]


def fixed_batch(signature: Signature) -> int | None:
    """Return the size of the first axis if all inputs with axes fix it to the same value. Otherwise return None."""
    sizes = {spec.shape[0] if spec.shape else None for spec in signature.inputs if spec.shape != ()}
    size = next(iter(sizes)) if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def fits(shapes: Mapping[str, Shape], signature: Signature, *, free_batch: bool = False) -> bool:
    """Return whether shapes match the inputs: the ranks and the fixed sizes are the same, and each symbol has the same
    size everywhere.
    """
    return find_misfit(shapes, signature, free_batch=free_batch) is None


def fit_inputs(location: str, inputs: Mapping[str, Array], signature: Signature, *, prepared: bool) -> dict[str, Array]:
    """Return inputs for `session.run`, in the model's order.

    A missing batch axis is added. If the model takes a scalar, the axes of a single value are dropped. A dtype is
    converted if the conversion loses nothing but precision.

    Args:
        location: name of the sample in messages.
        inputs: arrays by input name.
        prepared: whether the arrays are as the user stored them. If so, integers for a floating input are refused,
            because they are most likely raw data without preprocessing.

    Raises:
        DataError: the model has no input of that name, or does not accept a dtype or a value (NaN, infinity). Shapes
            are checked by `fits`.
    """
    names = [spec.name for spec in signature.inputs]
    for name in inputs:
        if not name:
            raise DataError(
                f"{location} is one array, the model takes {len(names)}",
                f"Give a dict of {', '.join(names)}, or a tuple in that order",
            )
        if name not in names:
            raise DataError(f"{location}: {name!r} is not an input of the model", f"The inputs are {', '.join(names)}")
    result = {}
    for spec in signature.inputs:
        if spec.name not in inputs:
            raise DataError(f"{location} has nothing for the model input {spec.name!r}", "Give every input")
        if isinstance(inputs[spec.name], str | Path):
            raise DataError(f"{location}: input {spec.name!r} is text or a path", "Name the ⟨preprocess⟩ that reads it")
        array = np.asarray(inputs[spec.name])
        # Most users store one item without the batch axis that the model's input has.
        if spec.shape is not None and array.ndim == len(spec.shape) - 1:
            array = array[None]
        # numpy stores a lone number as an array of one element.
        elif spec.shape == () and array.shape == (1,):
            array = array[0]
        other_inputs = [] if prepared else [name for name in names if name != spec.name]
        result[spec.name] = _convert(location, array, spec, prepared=prepared, other_inputs=other_inputs)
    return result


def check_shapes(location: str, inputs: Mapping[str, Array], signature: Signature) -> None:
    """Raise a DataError that names the first input whose shape the model cannot take.

    If all inputs fix the same batch size, that size is not checked, because rows are gathered into batches later.
    """
    shapes = {name: array.shape for name, array in inputs.items()}
    wrong = find_misfit(shapes, signature, free_batch=fixed_batch(signature) is not None)
    if wrong is not None:
        added = find_missing_step(shapes, signature)
        fix = f"Add {added} to ⟨preprocess⟩" if added else "Correct the data or its preprocessing"
        raise DataError(f"{location}: {wrong}", fix)


def _convert(location: str, array: Array, spec: TensorSpec, *, prepared: bool, other_inputs: Sequence[str]) -> Array:
    if spec.dtype.hasobject and (array.dtype.kind in "SU" or all(isinstance(text, str) for text in array.flat)):
        return array.astype(str)  # texts in a dtype that files can store
    # Objects would be pickled or converted one by one, and structured arrays have no numeric value.
    if array.dtype.kind in "OV" and array.dtype != spec.dtype:
        raise DataError(f"{location}: input {spec.name!r} holds Python objects", "Give numeric arrays of one shape")
    if array.dtype != spec.dtype:
        number = array.dtype.kind in "biuf" and spec.dtype.kind in "biuf"
        # Integers for a float input are most likely pixels that nobody normalised.
        raw = prepared and array.ndim and array.dtype.kind != "f" and spec.dtype.kind == "f"
        if not number or raw or not np.can_cast(array.dtype, spec.dtype, "same_kind"):
            # Steps convert the arrays of all inputs to float unless the steps are limited to one input.
            hint = f"; if the steps are for another input, name it: input={other_inputs[0]}" if other_inputs else ""
            storable = "Store that dtype" if spec.dtype.isbuiltin == 1 else "Export the model with inputs of float32"
            fix = "Name a ⟨preprocess⟩ (none, if the values are right)" if raw else storable + hint
            raise DataError(f"{location}: input {spec.name!r} is {array.dtype}, the model takes {spec.dtype}", fix)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        flaw = "NaN" if np.isnan(array).any() else "infinity"
        raise DataError(f"{location}: input {spec.name!r} holds {flaw}", "Remove the sample or correct its data")
    if array.dtype == spec.dtype:
        return np.asarray(array, order="C")
    check_size(array.size * spec.dtype.itemsize, f"{location}: input {spec.name!r}", "Give smaller samples")
    # Overflow is found below, in the values, and reported with the sample's name.
    with np.errstate(over="ignore"):
        converted = array.astype(spec.dtype)
    lossless = spec.dtype.kind == "f" or bool((converted == array).all())
    if not lossless or (spec.dtype.kind == "f" and not np.isfinite(converted).all()):
        raise DataError(
            f"{location}: input {spec.name!r} has values that do not fit into {spec.dtype}", "Correct the data"
        )
    return np.asarray(converted, order="C")


def find_misfit(shapes: Mapping[str, Shape], signature: Signature, *, free_batch: bool = False) -> str | None:
    """Return a sentence about the first input whose array the model does not take, or None if all of them fit.

    Args:
        shapes: shapes of the arrays by input. Inputs without one are not checked.
        free_batch: whether the first axis may have any size.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for spec in signature.inputs:
        if spec.name not in shapes or spec.shape is None:
            continue
        shape = shapes[spec.name]
        # `fit_inputs` drops the axis of such an array later.
        single_value = spec.shape == () and shape == (1,)
        wrong = len(shape) != len(spec.shape) and not single_value
        for axis, (have, want) in enumerate(zip(shape, spec.shape, strict=False)):
            wrong = wrong or (isinstance(want, int) and want != have and not (axis == 0 and free_batch))
        if wrong:
            return f"input {spec.name!r} has shape {list(shape)}, the model takes {spec}"
        # Symbols are compared only after all fixed sizes match, so that the message names the simpler error.
        for axis, (have, want) in enumerate(zip(shape, spec.shape, strict=False)):
            if isinstance(want, str) and not (axis == 0 and free_batch):
                size, first_name = sizes.setdefault(want, (have, spec.name))
                if size != have:
                    return (
                        f"the model's size {want!r} is both {size} (input {first_name!r}) and {have} "
                        f"(input {spec.name!r} of shape {list(shape)}); "
                        "give independent sizes different names in the model"
                    )
    return None


def find_missing_step(items: Mapping[str, Shape], signature: Signature) -> str:
    """Return the preprocessing step that gives an item the model's shape, or "" if there is none. The step adds an axis
    (grey images may lack the channel axis) or moves the channels to the correct axis.
    """
    for spec in signature.inputs:
        item, expected = items.get(spec.name, ()), (spec.shape or ())[1:]
        for axis in range(len(expected) if len(item) == len(expected) - 1 else 0):
            if expected[axis] == 1 and _has_sizes((*item[:axis], 1, *item[axis:]), expected):
                return f"expand={axis}"
        if len(expected) == 3 and len(item) in (3, 4):
            # Both orders of the channels are tried, because the message should name the exact step to add.
            rows, columns, channels = item[-3:]
            if _has_sizes((channels, rows, columns), expected):
                return "layout=NCHW"
            channels, rows, columns = item[-3:]
            if _has_sizes((rows, columns, channels), expected):
                return "layout=NHWC"
    return ""


def _has_sizes(sizes: Shape, expected: Sequence[Dimension]) -> bool:
    """Return whether `sizes` agree with all the sizes that the model fixes. Return False if the model fixes none."""
    return any(isinstance(want, int) for want in expected) and all(
        have == want for have, want in zip(sizes, expected, strict=True) if isinstance(want, int)
    )


def count_rows(inputs: Mapping[str, Any]) -> int:
    """Return the size of the first axis, which must be the same for all inputs.

    Raises:
        DataError: the sizes differ.
    """
    # Scalars have no rows and fit any batch.
    sizes = {array.shape[0] for array in inputs.values() if array.ndim}
    if len(sizes) != 1:
        raise DataError(f"the inputs have batches of {sorted(sizes)}", "Give every input the same number of rows")
    return int(sizes.pop())
