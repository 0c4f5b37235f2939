"""Classifiers: one row of scores, one for each class.

    scores [1, C] (or [1, C, 1, 1]): probabilities after a softmax, or logits

Logits become probabilities by a softmax. Rows that sum to 1 are probabilities already.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.families.multi_label import is_multi_label
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head

# A row of probabilities sums to 1 up to rounding.
_ROUNDING = 1e-2
_TOP = 5


def decode(outputs: Outputs, head: Head, frame: Any) -> Answer:
    """Return the best classes with their probabilities."""
    del frame
    scores = read_scores(outputs[head.outputs["scores"]])
    offset = int(head.parameters.get("offset", 0))
    if head.parameters.get("scores") == "logits":
        exponents = np.exp(scores - scores.max())
        scores = exponents / exponents.sum()
    scores = scores[offset:]
    best = np.argsort(-scores, kind="stable")[: int(head.thresholds.get("limit", _TOP))]
    confidence = head.thresholds.get("confidence", 0.0)
    return Answer("classify", top={int(n): float(scores[n]) for n in best if scores[n] >= confidence})


def read_scores(array: Any) -> Any:
    """Return an output [1, C] or [1, C, 1, 1] as float64 [C]."""
    if array.ndim not in (2, 4) or array.size != array.shape[1] or array.size < 2:
        raise ValueError("the scores are not [1, C]")
    return np.asarray(array, np.float64).reshape(-1)


def fit(view: View) -> Optional[Fit]:
    """Accept the only float output if it is a row of probabilities, or if the number of classes is known to be its
    size, and it is no row of a multi-label model. A row of other values may as well be an embedding. If the family is
    named, accept any row.
    """
    floats = {name: array for name, array in view.outputs.items() if array.dtype.kind == "f"}
    if len(floats) != 1:
        return None
    ((name, array),) = floats.items()
    if array.ndim not in (2, 4) or array.size != (array.shape[1] if array.ndim > 1 else 0) or array.size < 2:
        return None
    row = np.asarray(array, np.float64).reshape(-1)
    probabilities = bool((row >= 0).all() and abs(row.sum() - 1) < _ROUNDING)
    # Models of TensorFlow have a background class before the others.
    offset = 1 if view.classes == array.size - 1 else 0
    sizes = (array.size, array.size - 1)
    if not view.named and (is_multi_label(row, view.classes) or (not probabilities and view.classes not in sizes)):
        return None
    if view.classes is not None and view.classes != array.size - offset:
        return None
    parameters = {"scores": "probabilities" if probabilities else "logits", **({"offset": 1} if offset else {})}
    return Fit({"scores": name}, parameters)


FAMILY = Family(
    "classify", "classify", "scores [1, classes]", fit, decode=decode, thresholds={"confidence": 0.0, "limit": _TOP}
)
