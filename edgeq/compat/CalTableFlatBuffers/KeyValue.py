# ruff: noqa: N999
"""Hands on KeyValue, which is onnxruntime's own: an entry of a calibration table."""

from __future__ import annotations

from typing import Any

from edgeq.compat._onnxruntime import quantization_tools


def __getattr__(name: str) -> Any:
    return getattr(quantization_tools("CalTableFlatBuffers.KeyValue"), name)
