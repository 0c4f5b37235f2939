"""Build for TensorRT: a model with explicit quantization in the file, or a float model with a calibration table next to
it.
"""

from __future__ import annotations

from edgeq.backends.tensorrt.backend import TensorrtBackend

__all__ = ["TensorrtBackend"]
