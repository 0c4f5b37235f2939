"""Hands on qnn_preprocess_model, which is onnxruntime's own."""

from __future__ import annotations

from typing import Any

from edgeq.compat._onnxruntime import quantization_tools


def __getattr__(name: str) -> Any:
    return getattr(quantization_tools("execution_providers.qnn.preprocess"), name)
