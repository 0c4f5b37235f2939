"""Hands on CudaQuantizer, which is onnxruntime's own: it lays weights out for the CUDA provider's kernels."""

from __future__ import annotations

from typing import Any

from edgeq.compat._onnxruntime import quantization_tools


def __getattr__(name: str) -> Any:
    return getattr(quantization_tools("cuda_quantizer"), name)
