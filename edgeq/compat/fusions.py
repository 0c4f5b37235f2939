"""Refuses the import: `onnxruntime.quantization.fusions` is left out."""

from __future__ import annotations

from edgeq.compat._left_out import left_out

raise left_out("fusions")
