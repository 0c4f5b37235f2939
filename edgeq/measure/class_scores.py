"""Whether an output holds class scores, so that its arg-max means something: by its values where no task says so.

An output is taken for class scores if it is the model's only float output, of shape [N, C] (further axes of length 1
allowed) with N the rows of an input and C at least two, not of an input's shape, and one of these holds:

- every row is a probability distribution: not negative, summing to one;
- its name says so ("logits", "scores", "probabilities", ...);
- it has five columns or more, all of like scale, its arg-max differs between rows, and the softmax of a row is on
  average at least a tenth of the way from a guess to certainty. Elements of an embedding or of a recurrent state are
  further from certainty, and of landmarks in pixels the same one is always the largest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMED = re.compile(r"logit|prob|softmax|class|score", re.IGNORECASE)
_FEWEST_COLUMNS = 5
_LEAST_CONFIDENCE = 0.1


@dataclass
class ClassScores:
    """What the rows of one output, seen so far, say of it.

    Attributes:
        shaped: whether every array was shaped like class scores.
        alone: whether every array was also float, with the rows of an input, and not of an input's shape.
        summed: whether every row is a distribution.
        confidence: sum over the rows of their largest probability.
        first: arg-max of the first row; `varied` whether another row has another.
    """

    shaped: bool = True
    alone: bool = True
    summed: bool = True
    rows: int = 0
    columns: int = 2
    confidence: float = 0.0
    first: int | None = field(default=None, repr=False)
    varied: bool = False

    def update(self, output: NDArray[Any], inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.int64] | None:
        """Add one sample: the arg-max of each row, [N]; None from the first output on that is not shaped so."""
        self.shaped = self.shaped and is_class_scores(output)
        if not self.shaped:
            return None
        scores = output.reshape(len(output), -1)
        best: NDArray[np.int64] = scores.argmax(1)
        shapes = [array.shape for array in inputs.values()]
        batched = len(output) == 1 or any(shape[:1] == output.shape[:1] for shape in shapes)
        self.alone = self.alone and output.dtype.kind == "f" and batched and output.shape not in shapes
        scores = scores.astype(np.float64)
        p = probabilities(scores)
        self.summed = self.summed and p is scores
        self.rows += len(p)
        self.columns = p.shape[1]
        self.confidence += float(p.max(1).sum())
        self.first = int(best[0]) if self.first is None else self.first
        self.varied = self.varied or bool((best != self.first).any())
        return best

    def merge(self, other: ClassScores) -> None:
        """Add what later samples say."""
        self.shaped, self.alone = self.shaped and other.shaped, self.alone and other.alone
        self.summed = self.summed and other.summed
        both = self.first is not None and other.first is not None
        self.varied = self.varied or other.varied or (both and self.first != other.first)
        self.first = other.first if self.first is None else self.first
        self.rows += other.rows
        self.columns = other.columns if other.rows else self.columns
        self.confidence += other.confidence

    @property
    def confident(self) -> bool:
        """Whether the rows are on average surer of their first class than a tenth of the way from a guess on."""
        guess = 1 / self.columns
        return bool(self.rows) and (self.confidence / self.rows - guess) / (1 - guess) >= _LEAST_CONFIDENCE

    def plausible(self, name: str, *, one_unit: bool = True) -> bool:
        """Return whether the only output of a model, called `name`, is to be taken for class scores.

        Args:
            one_unit: whether its columns are of one scale.
        """
        if not (self.shaped and self.alone and self.rows):
            return False
        likely = one_unit and self.columns >= _FEWEST_COLUMNS and self.varied and self.confident
        return self.summed or bool(_NAMED.search(name)) or likely


def is_class_scores(array: NDArray[Any]) -> bool:
    """Whether `array` is shaped like class scores: a batch axis and one axis of two or more, others of length 1."""
    return array.ndim >= 2 and array.size > 0 and max(array.shape[1:]) == math.prod(array.shape[1:]) >= 2


def probabilities(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows that are not negative and sum to one as they are; the softmax of others. [N, C] → [N, C]."""
    if scores.min() >= -1e-6 and np.abs(scores.sum(1) - 1).max() <= 1e-3:
        return scores
    finite = np.nan_to_num(scores, nan=np.finfo(np.float64).min, posinf=1e30)
    raised = np.exp(finite - finite.max(1, keepdims=True))
    spread: NDArray[np.float64] = raised / raised.sum(1, keepdims=True)
    return spread
