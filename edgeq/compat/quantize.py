"""Stands for `onnxruntime.quantization.quantize`: the module that scripts import from, and the function of its name."""

from __future__ import annotations

from typing import Any

from edgeq.compat._names import own_or_theirs
from edgeq.util.registry import make_callable

make_callable(__name__, "edgeq.compat.configs:quantize")


def __getattr__(name: str) -> Any:
    return own_or_theirs(name, "quantize")
