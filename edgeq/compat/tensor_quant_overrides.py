"""Hands on TensorQuantOverridesHelper and QuantTypeInfo, which are onnxruntime's own."""

from __future__ import annotations

from typing import Any

from edgeq.compat._onnxruntime import quantization_tools


def __getattr__(name: str) -> Any:
    return getattr(quantization_tools("tensor_quant_overrides"), name)
