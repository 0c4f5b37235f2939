"""Count the edits between two sequences: characters for the CER, words for the WER."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def count_edits(sequence: Sequence[Any], target: Sequence[Any]) -> int:
    """Return the Levenshtein distance: the fewest insertions, deletions and substitutions of one item that turn
    `sequence` into `target`. The time grows with the product of the lengths.
    """
    numbers: dict[Any, int] = {}
    a, b = (
        np.array([numbers.setdefault(item, len(numbers)) for item in items], np.int64) for items in (sequence, target)
    )
    steps = np.arange(len(b) + 1)
    row = steps
    for length, item in enumerate(a, start=1):
        best = np.concatenate([[length], np.minimum(row[1:] + 1, row[:-1] + (b != item))])
        # An insertion costs one more than the entry on its left: the running minimum, less its position.
        row = np.minimum.accumulate(best - steps) + steps
    return int(row[-1])
