"""Modules of onnxruntime's quantization tools, for what is taken from there as it is."""

from __future__ import annotations

import importlib
from typing import Any


def quantization_tools(module: str = "") -> Any:
    """`onnxruntime.quantization`, or a module of it by name.

    Raises:
        RuntimeUnavailableError: onnxruntime is not installed.
    """
    from edgeq.run.session import onnxruntime

    onnxruntime()
    return importlib.import_module(f"onnxruntime.quantization{'.' if module else ''}{module}")
