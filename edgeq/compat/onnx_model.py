"""Hands on ONNXModel, which is onnxruntime's own: what a weight-only quantizer has as `model`."""

from __future__ import annotations

from typing import Any

from edgeq.compat._onnxruntime import quantization_tools


def __getattr__(name: str) -> Any:
    return getattr(quantization_tools("onnx_model"), name)
