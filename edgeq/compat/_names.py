"""What the modules have that stand for onnxruntime's: names of edgeq.compat first."""

from __future__ import annotations

from typing import Any

from edgeq import compat
from edgeq.compat._onnxruntime import quantization_tools


def own_or_theirs(name: str, module: str) -> Any:
    """What `edgeq.compat` has under a name, or else onnxruntime's module: scripts import helpers from there too.

    Raises:
        AttributeError: neither has the name.
    """
    if name.startswith("__") or name in dir(compat):
        return getattr(compat, name)
    return getattr(quantization_tools(module), name)
