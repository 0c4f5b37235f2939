"""Measure text detection: the harmonic mean (hmean) of recall and precision over lines of text.

A line counts as right if its polygon overlaps a free labelled one by an IoU above 0.5, one to one, the best overlap
first. A labelled line with the text "###" does not matter: it need not be found, and detections that lie inside it by
more than half of their area do not count. Source: ICDAR 2015, challenge 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.answers.answer import Answer
from numpy.typing import NDArray

from edgeq.data.limits import read_text
from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.answer_metric import AnswerMetric, add_up, read_label
from edgeq.measure.answer_sums import Sums
from edgeq.measure.polygons import compute_polygon_cover, compute_polygon_overlaps
from edgeq.measure.task import TaskKind

_OVERLAP, _COVERED = 0.5, 0.5
_NO_MATTER = "###"
# More lines than any page has.
_MOST_LINES = 100_000


def parse_lines(text: str, location: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the polygons [N, 4, 2] of a label file, and whether each matters [N].

    A line of the file is x1,y1,x2,y2,x3,y3,x4,y4 and may end with ,text. Source: ICDAR 2015.

    Raises:
        DataError: a line has another form, or there are too many.
    """
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if len(lines) > _MOST_LINES:
        raise DataError(f"{location} has more than {_MOST_LINES} lines", "Give one file for each image")
    polygons, matters = [], []
    for number, line in enumerate(lines, 1):
        cells = line.split(",", 8)
        try:
            corners = np.array(cells[:8], np.float64).reshape(4, 2)
        except ValueError:
            corners = np.full((4, 2), np.nan)
        if not np.isfinite(corners).all():
            raise DataError(f"{location}: line {number} does not begin with eight numbers", "Write x1,y1,…,x4,y4,text")
        polygons.append(corners)
        matters.append(cells[8:] != [_NO_MATTER])
    return np.array(polygons, np.float64).reshape(-1, 4, 2), np.array(matters, bool)


def read(answer: Answer, sample: Sample) -> Sums:
    """Count the right lines of one image. The label is the text of a label file, or its path."""
    label = read_label(sample)
    text = read_text(label) if isinstance(label, Path) else str(label)
    truth, matters = parse_lines(text, sample.name)
    polygons: Any = answer.polygons if answer.polygons is not None else np.zeros((0, 4, 2))
    inside = compute_polygon_cover(polygons, truth[~matters]) > _COVERED
    polygons, truth = polygons[~inside.any(axis=1)], truth[matters]
    overlaps = compute_polygon_overlaps(polygons, truth)
    right = 0
    while overlaps.size and overlaps.max() > _OVERLAP:
        row, column = np.unravel_index(int(overlaps.argmax()), overlaps.shape)
        overlaps[row], overlaps[:, column] = 0.0, 0.0
        right += 1
    return {"right": float(right), "lines": float(len(truth)), "detected": float(len(polygons))}


def summarize(values: Sequence[Sums]) -> Mapping[str, float]:
    """Return "hmean", "recall" and "precision" over all images."""
    sums = add_up(values)
    if not sums["lines"]:
        raise DataError("no line of text is labelled in the images", "Raise ⟨count⟩")
    return {
        "hmean": 2 * sums["right"] / (sums["lines"] + sums["detected"]),
        "recall": sums["right"] / sums["lines"],
        "precision": sums["right"] / sums["detected"] if sums["detected"] else 0.0,
    }


TASK = TaskKind(
    "text-detection",
    "harmonic mean of recall and precision over lines of text",
    lambda options: AnswerMetric("text-detection", "hmean", read, summarize, frozenset({"text-detect"})),
    frozenset(),
)
