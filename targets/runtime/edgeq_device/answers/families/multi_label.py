"""Multi-label classifiers: a probability for each class, which do not exclude each other.

scores [1, C] (or [1, C, 1, 1]): probabilities after a sigmoid, or logits
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.checks import find_rows, read_row
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.raster import score_scale, to_probabilities

_FEWEST = 8


def decode(outputs: Outputs, head: Head, frame: Any) -> Answer:
    """Return the classes whose probability reaches the threshold, best first."""
    del frame
    scores = to_probabilities(read_row(outputs[head.outputs["scores"]]), head.parameters.get("scores"))
    best = np.argsort(-scores, kind="stable")
    least = head.thresholds.get("confidence", 0.5)
    return Answer("multi-label", top={int(n): float(scores[n]) for n in best if scores[n] >= least})


def fit(view: View) -> Optional[Fit]:
    """Accept the only row if it is named, or if it has a probability for each of at least 8 stated classes and these
    do not sum to 1.
    """
    rows = find_rows(view.outputs)
    if len(rows) != 1:
        return None
    ((name, row),) = rows.items()
    if view.classes not in (None, len(row)) or not (view.named or is_multi_label(row, view.classes)):
        return None
    return Fit({"scores": name}, {"scores": score_scale(row)})


def is_multi_label(row: Any, classes: Optional[int]) -> bool:
    """Return whether a row [C] can hardly be anything but probabilities that do not exclude each other."""
    return classes == len(row) >= _FEWEST and score_scale(row) == "probabilities" and abs(row.sum() - 1) > 0.05


FAMILY = Family("multi-label", "multi-label", "scores [1, classes]", fit, decode=decode, thresholds={"confidence": 0.5})
