"""Hands on ONNXQuantizer, which is onnxruntime's own. `edgeq.compat.quantize_static` checks what it writes."""

from __future__ import annotations

from typing import Any

from edgeq.compat._onnxruntime import quantization_tools


def __getattr__(name: str) -> Any:
    return getattr(quantization_tools("onnx_quantizer"), name)
