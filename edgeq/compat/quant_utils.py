"""Replace `onnxruntime.quantization.quant_utils`: QuantType, QuantFormat, write_calibration_table,
load_model_with_shape_infer. Other helpers are onnxruntime's own.
"""

from __future__ import annotations

from typing import Any

from edgeq.compat._names import find
from edgeq.compat.preprocess import load_model_with_shape_infer as load_model_with_shape_infer


def __getattr__(name: str) -> Any:
    return find(name, "quant_utils")
