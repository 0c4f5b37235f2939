"""What calibration was for in 2020 to 2023: TensorRT's table, and scales for the older `quantize`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.calibrate.ranges import Range
from edgeq.calibrate.table import write_tables
from edgeq.compat.calibration import CalibratorOptions, as_ranges, ranges_of, statistics_of
from edgeq.compat.source import ModelInput, as_given, warn_unknown_nodes
from edgeq.model.graph import clamps, name_of
from edgeq.model.quant_params import dynamic_params


def write_calibration_table(calibration_cache: Mapping[str, Any], dir: str | Path = ".") -> None:
    """Write calibration.flatbuffers, calibration.json and calibration.cache, replacing those that are there.

    Each tensor gets its largest magnitude, which is what the TensorRT provider reads (onnxruntime's function writes the
    upper end of the range, so a tensor of negative numbers loses its scale).

    Args:
        calibration_cache: what compute_data or compute_range gave, or a dict of pairs or of magnitudes.

    Raises:
        CalibrationError: a range is not finite, or a name has white space in it.
    """
    pairs = {
        name: (-abs(float(value)), abs(float(value))) if np.ndim(value) == 0 and not _is_range(value) else value
        for name, value in calibration_cache.items()
    }
    write_tables(Path(dir), as_ranges(pairs))


def calibrate(
    model_path: ModelInput,
    data_reader: Any,
    op_types: Sequence[str] = ("Conv", "MatMul"),
    black_nodes: Sequence[str] = (),
    white_nodes: Sequence[str] = (),
    augmented_model_path: str = "augmented_model.onnx",
) -> dict[str, list[Any]]:
    """Scales and zero points of the inputs and outputs of some operators, for `quantize`'s quantization_params.

    Args:
        op_types: operator types; `white_nodes` are taken as well, `black_nodes` are not.
        augmented_model_path: accepted; no augmented model is needed.

    Returns:
        {tensor: [zero point (uint8), scale (float32)]}, from minima and maxima. A tensor that only a Relu or Clip reads
        has the range of what that gives, so that it can be dropped.
    """
    del augmented_model_path
    with tempfile.TemporaryDirectory(prefix="edgeq-calibrate-") as folder:
        prepared = as_given(model_path, Path(folder))
        graph = prepared.model.graph
        warn_unknown_nodes(prepared.model, black_nodes, white_nodes)
        ranges = ranges_of(statistics_of(prepared, data_reader), "MinMax", CalibratorOptions())
    for clamp in reversed(list(clamps(graph))):
        source, result = name_of(clamp.inputs[0]), name_of(clamp.outputs[0])
        if result in ranges:
            ranges[source] = ranges[result]
    names = [
        name_of(value)
        for node in graph
        if (node.op_type in op_types or node.name in white_nodes) and node.name not in black_nodes
        for value in (*node.inputs, *node.outputs)
    ]
    return {name: _params(ranges[name]) for name in dict.fromkeys(names) if name in ranges}


def _params(span: Range) -> list[Any]:
    params = dynamic_params(np.asarray([span.low, span.high]))
    return [np.uint8(params.zero_point), np.float32(params.scale)]


def _is_range(value: Any) -> bool:
    return hasattr(value, "range_value")
