"""Describe the inputs and outputs of models in the terms of onnxruntime. This needs no numpy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import List, Mapping, Union

DTYPES: Mapping[str, str] = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
    **{f"tensor({kind}{bits})": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}
"""numpy's name of each type, keyed by onnxruntime's name."""
# Texts that exporters write for a free size. They are not names, so two such sizes need not be equal.
_PLACEHOLDER = re.compile(r"([?*]|-?\d+|none|null|any|unknown|dynamic|unk__.*)?", re.IGNORECASE)


def is_name(text: str) -> bool:
    """Return whether sizes with this name must be equal. If not, the name only marks a free size."""
    return _PLACEHOLDER.fullmatch(text.strip()) is None


@dataclass(frozen=True)
class TensorInfo:
    """Describe an input or output like onnxruntime's NodeArg."""

    name: str
    type: str
    shape: List[Union[int, str, None]]
