"""Implicit quantization: a float model in which every tensor has a shape and a range, and a table of those ranges.

TensorRT chooses by itself what runs in int8. Up to version 10 only; Q/DQ and a table exclude each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
from edgeq_device.version import parse_version

from edgeq.backends.tensorrt.facts import facts
from edgeq.calibrate.ranges import Range
from edgeq.calibrate.table import CACHE, FLATBUFFERS, JSON, write_native, write_tables
from edgeq.calibrate.tensors import quantizable_tensors
from edgeq.errors import CalibrationError, HardwareError, ModelError
from edgeq.model.load import is_quantized
from edgeq.model.shapes import write_shapes

NATIVE = "calibration.tensorrt"
"""TensorRT's own form of the table, for trtexec and for builders that are not ONNX Runtime's."""
FILES = (FLATBUFFERS, JSON, CACHE, NATIVE)


def check_version(tensorrt: str, where: str) -> None:
    """Refuse a target whose TensorRT takes no table, or does not say which it has.

    Args:
        tensorrt: version; "" where it is not known.
        where: the target, for the message.
    """
    known = facts()
    if not tensorrt:
        raise HardwareError(
            f"{where} does not say which TensorRT it has: {known.table_reason}",
            "Name a target with `runtime.tensorrt`, or leave --format QDQ",
        )
    if parse_version(tensorrt) >= parse_version(known.table_below_tensorrt):
        raise HardwareError(f"{where} has TensorRT {tensorrt}: {known.table_reason}", known.table_fix)


def write_implicit(model: ir.Model, ranges: Mapping[str, Range], folder: Path, tensorrt: str) -> tuple[str, ...]:
    """Write the tables of `model` into `folder`, complete or not at all, and give `model` all shapes that can be known.

    Raises:
        ModelError: `model` has Q/DQ.
        CalibrationError: a float tensor has no range, or a name that a table cannot carry.
    """
    if is_quantized(model):
        raise ModelError(
            "the model holds QuantizeLinear or DequantizeLinear, and TensorRT takes those or a table, not both",
            "Leave --format QDQ, or give the float32 model",
        )
    tensors = quantizable_tensors(model)
    missing = [name for name in tensors if name not in ranges]
    if missing:
        raise CalibrationError(
            f"tensor {missing[0]!r} has no range ({len(missing)} such in all), and TensorRT needs one for each",
            "Calibrate this model again, without a choice of tensors",
        )
    problem = write_shapes(model)
    wanted = {name: ranges[name] for name in tensors}
    write_tables(folder, wanted, tensors=tensors)
    write_native(folder / NATIVE, wanted, version=native_version(tensorrt))
    unknown = f"; some shapes are not known ({problem})" if problem else ""
    return (f"{len(tensors)} tensors have a range in the tables{unknown}",)


def native_version(version: str) -> str:
    """TensorRT's version as the first line of its cache spells it: "8.6.1" → "8601", "10.3" → "100300"."""
    major, minor, patch = (*parse_version(version), 0, 0)[:3]
    return f"{major}{minor:02}{patch:02}" if major >= 10 else f"{major}{minor}{patch:02}"
