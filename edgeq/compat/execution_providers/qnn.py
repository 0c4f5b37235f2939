"""Stands for `onnxruntime.quantization.execution_providers.qnn`: get_qnn_qdq_config and qnn_preprocess_model, which are
onnxruntime's own; `edgeq.compat.quantize` takes what they give."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = ("get_qnn_qdq_config", "qnn_preprocess_model")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edgeq.session import onnxruntime

    onnxruntime()  # one clear error where it is missing
    return getattr(importlib.import_module("onnxruntime.quantization.execution_providers.qnn"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
