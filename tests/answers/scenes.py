"""Draw objects with keypoints in an image that was letterboxed, stretched or cropped."""

from __future__ import annotations

import numpy as np
import pytest
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.decode import decode
from edgeq_device.answers.family import Fit, View, all_families, load_family
from edgeq_device.answers.head import Head
from edgeq_device.prepare.frame import Frame

FRAMES = ("letterbox", "stretch", "crop")


def make_frame(kind: str, size: tuple[int, int], original: tuple[int, int] = (333, 257)) -> Frame:
    """Return the frame of an image that a preprocessing of this kind fits into `size`."""
    frame = Frame.of(*original)
    if kind == "stretch":
        return frame.resized(*size)
    ratios = [inner / outer for inner, outer in zip(size, original, strict=True)]
    scale = min(ratios) if kind == "letterbox" else max(ratios)
    width, height = (round(side * scale) for side in original)
    return frame.resized(width, height).placed((size[0] - width) // 2, (size[1] - height) // 2, size)


def draw_objects(seed: int, count: int, points: int, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return boxes [count, 4] that do not overlap, and points [count, points, 2] within, in pixels of the input."""
    random = np.random.default_rng(seed)
    width = size[0] / count
    left = np.arange(count) * width + random.uniform(2, width / 4, count)
    right = (np.arange(count) + 1) * width - random.uniform(2, width / 4, count)
    top, bottom = random.uniform(0.05, 0.3, count) * size[1], random.uniform(0.6, 0.95, count) * size[1]
    boxes = np.stack([left, top, right, bottom], axis=1)
    shares = random.uniform(0.05, 0.95, (count, points, 2))
    return boxes, boxes[:, None, :2] + shares * (boxes[:, 2:] - boxes[:, :2])[:, None]


def fit_only(name: str, outputs: dict[str, np.ndarray], size: tuple[int, int], **stated: object) -> Fit:
    """Return the fit of a family, and fail if another family also takes the outputs."""
    view = View(outputs, size, **stated)  # type: ignore[arg-type]
    fits = {family.name: fit for family in all_families() if (fit := family.fit(view)) is not None}
    assert list(fits) == [name]
    return fits[name]


def answer_of(name: str, fit: Fit, outputs: dict[str, np.ndarray], frame: Frame) -> Answer:
    """Return the answer, objects ordered from left to right."""
    return decode(outputs, Head(name, fit.outputs, fit.parameters, load_family(name).thresholds), frame)


def check_objects(
    answer: Answer, frame: Frame, boxes: np.ndarray | None, points: np.ndarray | None, within: float = 0.5
) -> None:
    """Compare an answer with the truth in pixels of the input. Objects may come in any order."""
    order = np.argsort(answer.boxes[:, 0])
    if boxes is not None:
        np.testing.assert_allclose(answer.boxes[order], frame.to_original(boxes), atol=within)
    if points is not None:
        assert answer.keypoints is not None
        np.testing.assert_allclose(answer.keypoints[order, :, :2], frame.to_original(points), atol=within)


def frame_cases() -> list[object]:
    """Return kinds of frames with seeds."""
    return [pytest.param(kind, seed, id=f"{kind}-{seed}") for kind in FRAMES for seed in range(3)]
