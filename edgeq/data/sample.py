"""Define a sample, which is one run of the model: its inputs, and its label as a plain value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgeq.data.images import Array
from edgeq.util.display import Displayed


@dataclass(frozen=True)
class Sample(Displayed):
    """Hold the inputs of one run of the model.

    Attributes:
        name: the file name and the index in the file, for messages.
        inputs: the arrays for `session.run`, batch dimension included.
        label: class index or any other label that the reader found, or None. For a batch that was gathered for a model
            with a fixed batch size, this is the tuple of its rows' labels.
        context: "file" (base name), "path" (below the data folder), "index" (in the file) and "class" (sub-folder). For
            images, also "original_size" and "input_size" (width, height), "scale" and "offset" (see
            `edgeq_device.prepare.frame.Frame`).
            For a gathered batch, "rows" (the rows' contexts) and "valid" (the number of rows that are not padding).
    """

    name: str
    inputs: Mapping[str, Array]
    label: Any = None
    context: Mapping[str, Any] = field(default_factory=dict)


def plain_label(value: Any) -> Any:
    """Return text that contains a number as that number, and a numpy scalar as a Python scalar. Return any other value
    unchanged.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        text = value.strip()
        # 18 digits fit 64 bits. A longer text of digits is an identifier, not a class number.
        if re.fullmatch(r"[+-]?\d{1,18}", text):
            return int(text)
        # The pattern is stricter than float(), which would also turn "nan", "inf" and "1_0" into numbers.
        if re.fullmatch(r"[+-]?\d*\.\d+([eE][+-]?\d{1,3})?", text):
            return float(text)
        return text
    return value
