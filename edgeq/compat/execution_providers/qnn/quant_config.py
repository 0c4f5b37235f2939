"""Hands on get_qnn_qdq_config, which is onnxruntime's own."""

from __future__ import annotations

from typing import Any

from edgeq.compat._onnxruntime import quantization_tools


def __getattr__(name: str) -> Any:
    return getattr(quantization_tools("execution_providers.qnn.quant_config"), name)
