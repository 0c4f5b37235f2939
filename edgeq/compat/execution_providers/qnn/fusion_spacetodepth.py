"""Refuses the import: `onnxruntime.quantization.execution_providers.qnn.fusion_spacetodepth` is left out."""

from __future__ import annotations

from edgeq.compat._left_out import left_out

raise left_out("execution_providers.qnn.fusion_spacetodepth")
