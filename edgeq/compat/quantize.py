"""Stands for `onnxruntime.quantization.quantize`: the module that scripts import from, and the function of its name."""

from __future__ import annotations

from typing import Any

from edgeq import compat
from edgeq.callable_package import make_callable

make_callable(__name__, "edgeq.compat.configs:quantize")


def __getattr__(name: str) -> Any:
    return getattr(compat, name)
