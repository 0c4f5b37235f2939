"""Write an answer as lines of text: one line for each object, text, class, map or vector."""

from __future__ import annotations

from typing import Any, Iterator, List, Optional, Tuple

import numpy as np

from edgeq_device.answers.answer import Answer

# Maps of street scenes or people have up to 150 classes.
_CLASSES = 12


def describe(answer: Answer) -> List[str]:
    """Return the lines that say what the model found, best object first. Positions are in whole pixels."""
    lines = [] if answer.text is None else [f"text {answer.text!r}" if not answer.text else answer.text]
    lines += [f"{answer.label_of(number)} {score:.2f}" for number, score in answer.top.items()]
    lines += [_describe_object(answer, place) for place in range(len(answer))]
    if answer.map is not None:
        lines += [text for _, text in describe_map(answer)]
    if answer.vector is not None:
        lines.append(_describe_vector(answer.vector))
    return lines or ["no objects" if answer.task != "classify" else "no class above the threshold"]


def describe_map(answer: Answer) -> Iterator[Tuple[Optional[int], str]]:
    """Yield the class number, or None, and the description of each part of the answer's map, the largest first."""
    values: Any = answer.map
    height, width = values.shape[:2]
    if values.ndim == 3:
        yield None, f"image {width}x{height}"
    elif values.dtype.kind in "iu":
        numbers, counts = np.unique(values, return_counts=True)
        for place in np.argsort(-counts, kind="stable")[:_CLASSES]:
            yield int(numbers[place]), f"{answer.label_of(int(numbers[place]))} {counts[place] / values.size:.1%}"
    else:
        finite = values[np.isfinite(values)]
        low, mean, high = (finite.min(), finite.mean(), finite.max()) if finite.size else [np.nan] * 3
        yield None, f"{answer.task} {width}x{height}: min {low:.4g}, mean {mean:.4g}, max {high:.4g}"


def _describe_object(answer: Answer, place: int) -> str:
    # A box may reach to infinity, which is no whole number.
    box = " ".join(f"{value:.0f}" for value in answer.boxes[place])
    line = f"{answer.label_of(int(answer.classes[place]))} {answer.scores[place]:.2f}  {box}"
    if answer.angles is not None:
        line += f"  {np.degrees(answer.angles[place]):.0f}°"
    if answer.keypoints is not None:
        line += f"  {len(answer.keypoints[place])} keypoints"
    if answer.masks is not None:
        line += f"  {int(answer.masks[place].sum())} pixels"
    if answer.polygons is not None:
        line += f"  {len(answer.polygons[place])} corners"
    return line


def _describe_vector(vector: Any) -> str:
    if len(vector) <= 4:
        return "values " + " ".join(f"{value:.4g}" for value in vector)
    return f"vector of {len(vector)} values, norm {np.linalg.norm(vector):.4g}"
