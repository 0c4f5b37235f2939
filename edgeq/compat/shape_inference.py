"""Where onnxruntime.quantization keeps `quant_pre_process`."""

from __future__ import annotations

from edgeq.compat.preprocess import quant_pre_process

__all__ = ["quant_pre_process"]
