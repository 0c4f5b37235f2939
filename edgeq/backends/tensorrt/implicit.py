"""Write what TensorRT needs for implicit quantization: a float model with all its shapes, and a calibration table.

The table contains the range of every tensor. TensorRT then chooses by itself which nodes run in int8. This works only
up to TensorRT 10. A model cannot have both Q/DQ pairs and a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
from edgeq_device.engines.catalog import parse_version

from edgeq.backends.tensorrt.options import facts
from edgeq.calibration.plan import quantizable_tensors
from edgeq.calibration.ranges import Range
from edgeq.calibration.table import CACHE, FLATBUFFERS, JSON, write_native, write_tables
from edgeq.errors import CalibrationError, HardwareError, ModelError
from edgeq.model.load import is_quantized
from edgeq.model.shapes import write_shapes

NATIVE = "calibration.tensorrt"
"""File name of the calibration table in TensorRT's own format, for trtexec and builders other than ONNX Runtime."""

FILES = (FLATBUFFERS, JSON, CACHE, NATIVE)


def check_version(tensorrt: str, target_name: str) -> None:
    """Refuse a target whose TensorRT does not support tables, or whose TensorRT version is not known.

    Args:
        tensorrt: version of TensorRT; "" if it is not known.
        target_name: the target, for the message.
    """
    record = facts()
    if not tensorrt:
        raise HardwareError(
            f"{target_name} does not name its TensorRT version: {record.table['reason']}",
            "Name a target with `runtime.tensorrt`, or use ⟨format⟩ QDQ",
        )
    if parse_version(tensorrt) >= parse_version(record.table["below_tensorrt"]):
        raise HardwareError(f"{target_name} has TensorRT {tensorrt}: {record.table['reason']}", record.table["fix"])


def write_implicit(model: ir.Model, ranges: Mapping[str, Range], folder: Path, tensorrt: str) -> tuple[str, ...]:
    """Write the calibration tables of `model` into `folder`, and add all known shapes to `model`. On failure, write no
    table.

    Raises:
        ModelError: `model` has Q/DQ.
        CalibrationError: a float tensor has no range, or has a name that a table cannot contain.
    """
    # TensorRT accepts pairs or a table, not both, and would say so only on the device.
    if is_quantized(model):
        raise ModelError(
            "the model has QuantizeLinear or DequantizeLinear; TensorRT accepts these or a table, not both",
            "Use ⟨format⟩ QDQ, or give the float32 model",
        )
    tensors = quantizable_tensors(model)
    missing = [name for name in tensors if name not in ranges]
    if missing:
        raise CalibrationError(
            f"tensor {missing[0]!r} has no range (missing: {len(missing)}), and TensorRT needs one for each tensor",
            "Calibrate this model again, for all its tensors",
        )
    # ONNX Runtime's TensorRT provider splits the graph, and its parts need shapes.
    problem = write_shapes(model)
    tensor_ranges = {name: ranges[name] for name in tensors}
    # Nothing is written before all checks have passed, so a refused model leaves no table that belongs to another.
    write_tables(folder, tensor_ranges, tensors=tensors)
    write_native(folder / NATIVE, tensor_ranges, version=native_version(tensorrt))
    unknown = f"; some shapes are not known ({problem})" if problem else ""
    return (f"{len(tensors)} tensors have a range in the tables{unknown}",)


def native_version(version: str) -> str:
    """Return TensorRT's version in the form of its cache's first line: "8.6.1" → "8601", "10.3" → "100300"."""
    major, minor, patch = (*parse_version(version), 0, 0)[:3]
    return f"{major}{minor:02}{patch:02}" if major >= 10 else f"{major}{minor}{patch:02}"
