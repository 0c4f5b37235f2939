"""Regression: numbers such as an age, angles of a pose, or a price.

    values [1, k]

Nothing in the outputs shows this, so a file or the user names the family. The parameters "scale" and "offset" bring the
values to their unit: value * scale + offset. The labels are the names of the values.
"""

from __future__ import annotations

from typing import Any, Optional

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.checks import find_rows, read_row
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head


def decode(outputs: Outputs, head: Head, frame: Any) -> Answer:
    """Return the values in their unit, float64 [k]."""
    del frame
    scale, offset = (float(head.parameters.get(key, default)) for key, default in (("scale", 1), ("offset", 0)))
    return Answer("regression", vector=read_row(outputs[head.outputs["values"]]) * scale + offset)


def fit(view: View) -> Optional[Fit]:
    """Accept the only row if the family is named."""
    rows = find_rows(view.outputs)
    if not view.named or len(rows) != 1 or len(view.outputs) != 1:
        return None
    return Fit({"values": next(iter(rows))})


FAMILY = Family("regression", "regression", "values [1, k]", fit, decode=decode)
