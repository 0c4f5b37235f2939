"""Stands for `onnxruntime.quantization.execution_providers.qnn`: get_qnn_qdq_config and qnn_preprocess_model, which are
onnxruntime's own; `edgeq.compat.quantize` takes what they give."""

from __future__ import annotations

from typing import Any

from edgeq.compat._onnxruntime import quantization_tools

_NAMES = ("get_qnn_qdq_config", "qnn_preprocess_model")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(quantization_tools("execution_providers.qnn"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
