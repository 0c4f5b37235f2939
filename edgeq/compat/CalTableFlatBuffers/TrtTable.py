# ruff: noqa: N999
"""Hands on TrtTable, which is onnxruntime's own: the root of a calibration table."""

from __future__ import annotations

from typing import Any

from edgeq.compat._onnxruntime import quantization_tools


def __getattr__(name: str) -> Any:
    return getattr(quantization_tools("CalTableFlatBuffers.TrtTable"), name)
