"""Build for TensorRT: explicit quantization written into the file, or a calibration table next to a float model."""

from __future__ import annotations

from edgeq.backends.tensorrt.backend import TensorrtBackend

__all__ = ["TensorrtBackend"]
