"""Stands for `onnxruntime.quantization.quant_utils`: QuantType, QuantFormat, write_calibration_table."""

from __future__ import annotations

from typing import Any

from edgeq import compat


def __getattr__(name: str) -> Any:
    return getattr(compat, name)
