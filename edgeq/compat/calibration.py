"""Ranges for the older functions, from edgeq's one pass: any method, any shapes, constant memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.calibrate.collect import collect
from edgeq.calibrate.ranges import Range, derive_ranges
from edgeq.calibrate.statistics import Statistics
from edgeq.compat.enums import METHODS, name_of_member
from edgeq.data.python_items import given_by
from edgeq.data.samples import open_samples
from edgeq.errors import CalibrationError, UsageError
from edgeq.model.prepare import PreparedModel
from edgeq.model.shapes import element_types
from edgeq.scheme import IntegerType

LEAST_FOR_ENTROPY = 1 << 14
"""Values from which on their distribution is known well enough; tensors that had fewer keep all of their range.
Documented examples calibrate with a handful of samples."""
PERCENTILE = 99.999
"""The documentation's default of CalibPercentile."""
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def statistics_of(prepared: PreparedModel, reader: Any, *, stride: int | None = None) -> Statistics:
    """Run the float model over what a reader gives and keep the statistics of every float tensor.

    Args:
        reader: a CalibrationDataReader, or anything else that `edgeq.open_samples` takes.
        stride: with a reader that has a length and `set_range`: read it in parts of so many, which must divide it.
    """
    source = _in_parts(reader, stride) if stride else reader
    samples = open_samples(source, prepared.signature, model=prepared.source)
    return collect(prepared.model, samples, activations(prepared.model), model_digest=prepared.digest)


def activations(model: ir.Model) -> tuple[str, ...]:
    """Names of the inputs and of every node's outputs, those that may hold floats; nothing is left out, since nothing
    is folded."""
    types = element_types(model)
    made = [value for node in model.graph for value in node.outputs]
    names = [v.name for v in (*model.graph.inputs, *made) if v.name and not v.is_initializer()]
    return tuple(name for name in names if types.get(name, ir.DataType.FLOAT) in _FLOATS)


def ranges_of(
    statistics: Statistics, method: Any, options: Mapping[str, Any], activation_type: IntegerType = "int8"
) -> dict[str, Range]:
    """Ranges as a CalibrationMethod and the Calib… options have it.

    Raises:
        UsageError: a method without 8-bit ranges, or a percentile that is none.
    """
    name = name_of_member(method)
    if name not in METHODS:
        raise UsageError(f"calibration method {name} gives no ranges of integers", f"It can be {', '.join(METHODS)}")
    chosen = METHODS[name]
    if chosen == "minmax" and options.get("CalibMovingAverage"):
        chosen = "moving-average"
    symmetric = bool(options.get("CalibTensorRangeSymmetric"))
    percentile = {"percentile": _percentile(options.get("CalibPercentile"))} if chosen == "percentile" else {}
    found = derive_ranges(statistics, chosen, activation_type=activation_type, symmetric=symmetric, options=percentile)
    if chosen == "entropy":
        whole = derive_ranges(statistics, "minmax", symmetric=symmetric)
        found |= {name: whole[name] for name, t in statistics.tensors.items() if t.count < LEAST_FOR_ENTROPY}
    return found


def read_cache(path: Path, method: Any) -> dict[str, Range]:
    """Ranges from a `calibration_cache_path` that an earlier run, of edgeq or of onnxruntime, wrote.

    Raises:
        CalibrationError: it is unreadable or of another method.
    """
    from onnxruntime.quantization import load_tensors_data

    try:
        data = load_tensors_data(path)
        found = {name: _range(value) for name, value in data.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{path} is no calibration cache: {error}", "Delete it or name another") from error
    wanted = name_of_member(method)
    if data.calibration_method.name != wanted:
        raise CalibrationError(
            f"{path} was made with {data.calibration_method.name}, not {wanted}", "Delete it or name another"
        )
    return found


def as_ranges(data: Any) -> dict[str, Range]:
    """Ranges from what a calibrator computed: `TensorsData`, or a dict of pairs, arrays or `TensorData`."""
    return {str(name): _range(value) for name, value in data.items()}


def _range(value: Any) -> Range:
    if hasattr(value, "range_value"):
        value = value.range_value
    low, high = (float(np.asarray(v, np.float64).reshape(-1)[0]) for v in value)
    return Range(min(low, 0.0), max(high, 0.0))


def _percentile(given: Any) -> float:
    try:
        return PERCENTILE if given is None else float(given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"CalibPercentile is {given!r}", "Give a number such as 99.999") from error


def _in_parts(reader: Any, size: Any) -> Iterator[Any]:
    if not isinstance(size, int):
        raise UsageError(f"CalibStridedMinMax is {size!r}", "Give a whole number")
    try:
        total = len(reader)
        rest = total % size
        set_range = reader.set_range
        if not rest:
            set_range(start_index=0, end_index=size)
    # onnxruntime's CalibrationDataReader has both, and they raise.
    except (NotImplementedError, AttributeError, TypeError) as error:
        raise UsageError(
            f"CalibStridedMinMax is {size}, and {type(reader).__name__} has no length or no set_range",
            "Leave it out: memory does not grow with the samples",
        ) from error
    if rest:
        raise UsageError(f"CalibStridedMinMax is {size}, the reader has {total} samples", "Let it divide them")
    for start in range(0, total, size):
        set_range(start_index=start, end_index=start + size)
        yield from given_by(reader)
