"""edgeq: quantize ONNX models for the hardware they will run on, prove the result, ship it as a bundle."""

from __future__ import annotations

__version__ = "0.1.0"
