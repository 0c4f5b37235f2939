"""Hands on the operator types that onnxruntime's quantizer takes: QLinearOpsRegistry, QDQRegistry and the others."""

from __future__ import annotations

from typing import Any

from edgeq.compat._onnxruntime import quantization_tools


def __getattr__(name: str) -> Any:
    return getattr(quantization_tools("registry"), name)
