"""Decide by its values whether a model's output contains class scores.

Top-1 is meaningful only for class scores. If no task names the output with class scores, edgeq decides by the values.
An output counts as class scores if three conditions are true:

- It is the model's only float output.
- Its shape is [N, C] (further axes of length 1 are allowed). N is the number of rows of an input, C is at least two,
  and no input has the same shape.
- It looks like scores in at least one of the ways below.

An output looks like scores in one of these ways:

- Every row is a probability distribution: not negative, and summing to one. The arg-max differs between rows, or there
  are fewer than eight rows or more than 64 columns. Otherwise the rows may be compositions.
- The name suggests scores ("logits", "scores", "probabilities", ...).
- There are five columns or more, all of similar scale. The arg-max differs between rows. The largest probability in the
  softmax of a row is on average at least a tenth of the way from a guess to certainty. Embeddings and recurrent states
  are excluded because their softmax is closer to a guess. Landmarks in pixels are excluded because the same element is
  always the largest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Parts of names that exporters and authors give to class scores.
_NAMED = re.compile(r"logit|prob|softmax|class|score", re.IGNORECASE)
# Boxes have four columns of one scale, so fewer than five prove nothing.
_FEWEST_COLUMNS = 5
# Share of the way from a guess to certainty. Embeddings and recurrent states stay below it.
_LEAST_CONFIDENCE = 0.1
# In fewer rows, one class may come first each time by chance.
_FEW_ROWS = 8
# A composition, such as that of a soil, has fewer parts.
_MOST_PARTS = 64


@dataclass
class ClassScores:
    """Collect facts about one output from the rows seen so far.

    Attributes:
        shaped: True if every array had the shape of class scores.
        alone: True if, in addition, every array was float, had as many rows as an input, and did not have the shape of
            an input.
        summed: True if every row is a distribution.
        bounded: True if all values are in 0..1.
        confidence: sum of the largest probability of each row.
        first_answer: arg-max of the first row.
        varied: True if a later row has a different arg-max.
    """

    shaped: bool = True
    alone: bool = True
    summed: bool = True
    bounded: bool = True
    rows: int = 0
    columns: int = 2
    confidence: float = 0.0
    first_answer: int | None = field(default=None, repr=False)
    varied: bool = False

    def update(self, output: NDArray[Any], inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.int64] | None:
        """Add one sample and return the arg-max of each row, [N].

        Return None if the output does not have the shape of class scores in this sample or in an earlier one.
        """
        self.shaped = self.shaped and is_class_scores(output)
        if not self.shaped:
            return None
        scores = output.reshape(len(output), -1)
        best: NDArray[np.int64] = scores.argmax(1)
        shapes = [array.shape for array in inputs.values()]
        # Scores have a row for each row of an input. Rows of anchors or tokens have none.
        batched = len(output) == 1 or any(shape[:1] == output.shape[:1] for shape in shapes)
        self.alone = self.alone and output.dtype.kind == "f" and batched and output.shape not in shapes
        scores = scores.astype(np.float64)
        p = probabilities(scores)
        # `probabilities` returns its argument itself if all rows sum to one.
        self.summed = self.summed and p is scores
        self.bounded = self.bounded and bool(scores.min() >= 0 and scores.max() <= 1)
        self.rows += len(p)
        self.columns = p.shape[1]
        self.confidence += float(p.max(1).sum())
        self.first_answer = int(best[0]) if self.first_answer is None else self.first_answer
        self.varied = self.varied or bool((best != self.first_answer).any())
        return best

    def merge(self, chunk: ClassScores) -> None:
        """Add the facts from later samples."""
        self.shaped, self.alone = self.shaped and chunk.shaped, self.alone and chunk.alone
        self.summed, self.bounded = self.summed and chunk.summed, self.bounded and chunk.bounded
        both = self.first_answer is not None and chunk.first_answer is not None
        self.varied = self.varied or chunk.varied or (both and self.first_answer != chunk.first_answer)
        self.first_answer = chunk.first_answer if self.first_answer is None else self.first_answer
        self.rows += chunk.rows
        self.columns = chunk.columns if chunk.rows else self.columns
        self.confidence += chunk.confidence

    @property
    def confident(self) -> bool:
        """Return whether the rows are, on average, at least a tenth of the way from a guess to certainty."""
        guess = 1 / self.columns
        return bool(self.rows) and (self.confidence / self.rows - guess) / (1 - guess) >= _LEAST_CONFIDENCE

    def plausible(self, name: str, *, one_unit: bool = True) -> bool:
        """Return whether the output called `name`, the model's only output, counts as class scores.

        Args:
            one_unit: whether all columns of the output have one scale.
        """
        if not (self.shaped and self.alone and self.rows):
            return False
        if self.summed:
            # In a composition, such as that of a soil, the largest part is always the same. It has few parts.
            return self.varied or self.rows < _FEW_ROWS or self.columns > _MOST_PARTS
        # Independent probabilities have an answer for each label, so the largest of them is not the answer.
        likely = one_unit and self.columns >= _FEWEST_COLUMNS and self.varied and self.confident
        return not self.bounded and (bool(_NAMED.search(name)) or likely)


def is_class_scores(array: NDArray[Any]) -> bool:
    """Return whether `array` has the shape of class scores: a batch axis, one axis of length two or more, and otherwise
    axes of length 1.
    """
    return array.ndim >= 2 and array.size > 0 and max(array.shape[1:]) == math.prod(array.shape[1:]) >= 2


def probabilities(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `scores` [N, C] unchanged if no row has negative values and all rows sum to one. Otherwise return the
    softmax of each row, [N, C].
    """
    # The tolerances allow for the rounding of a softmax in float16.
    if scores.min() >= -1e-6 and np.abs(scores.sum(1) - 1).max() <= 1e-3:
        return scores
    # NaN becomes the lowest score, so that it neither wins nor spreads to the whole row.
    finite = np.nan_to_num(scores, nan=np.finfo(np.float64).min, posinf=1e30)
    raised = np.exp(finite - finite.max(1, keepdims=True))
    spread: NDArray[np.float64] = raised / raised.sum(1, keepdims=True)
    return spread
