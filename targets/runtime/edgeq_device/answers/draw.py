"""Draw an answer over its image, on any canvas: boxes, masks, keypoints, polygons, maps and captions."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass, replace
from typing import Any, List, Optional, Tuple

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.lines import describe, describe_map
from edgeq_device.errors import UsageError

Colour = Tuple[int, int, int]
SUFFIXES = (".png", ".svg")
CAPTION: Colour = (32, 32, 32)
"""Background of captions."""
# A keypoint that scores less is not drawn, as in Ultralytics' pictures.
_VISIBLE = 0.25
# COCO's 17 keypoints: head, shoulders and arms, hips and legs.
_SKELETON = (
    (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 6), (5, 7), (7, 9), (6, 8), (8, 10), (5, 11), (6, 12),
    (11, 12), (11, 13), (13, 15), (12, 14), (14, 16),
)  # fmt: skip
# Five colours of matplotlib's viridis, dark to light, whose lightness grows evenly.
_SCALE = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], np.float64)
_TRANSLUCENT = 0.45


@dataclass(frozen=True)
class Shape:
    """Hold one part of a drawing, in pixels of the stored image.

    Attributes:
        points: [P, 2], closed for "area", open for "line"; the centre for "dot"; the upper left corner for "label".
        kind: "area", "line", "dot", "label" or "mask".
        content: text of a label, or bool [H, W] of a mask.
    """

    kind: str
    points: Any
    colour: Colour
    content: Any = None


@dataclass(frozen=True)
class Sketch:
    """Hold everything that is drawn over one image.

    Attributes:
        size: (width, height) of the image.
        image: uint8 [H, W, 3] that takes the place of the stored image; None to draw over the stored image.
        overlay: uint8 [H, W, 4], drawn over the image in its whole size; None if there is none.
        captions: lines under the image, each with the colour that it explains, or None.
        line: width of lines in pixels.
        font: height of letters in pixels.
    """

    size: Tuple[int, int]
    shapes: Tuple[Shape, ...] = ()
    image: Any = None
    overlay: Any = None
    captions: Tuple[Tuple[Optional[Colour], str], ...] = ()
    line: int = 2
    font: int = 12

    @property
    def row(self) -> int:
        """Return the height of one caption in pixels."""
        return self.font * 4 // 3


def colour_of(number: int) -> Colour:
    """Return the colour of a class. Neighbouring numbers differ in hue by the golden ratio, so few are alike."""
    red, green, blue = colorsys.hsv_to_rgb((0.6 + number * 0.618034) % 1, 0.8, 1.0)
    return round(red * 255), round(green * 255), round(blue * 255)


def is_dark(colour: Colour) -> bool:
    """Return whether white letters are easier to read on a colour than black ones (Rec. 601 luma)."""
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 140


def sketch(answer: Answer) -> Sketch:
    """Return the drawing of an answer.

    Raises:
        UsageError: the answer is not for an image.
    """
    if answer.image_size is None:
        raise UsageError("the input is not an image, so nothing can be drawn over it", "Leave --draw out")
    size = answer.image_size
    image = answer.map if answer.map is not None and answer.map.ndim == 3 else None
    if image is not None:
        size = (image.shape[1], image.shape[0])
    sides = sum(size) / 2
    plain = Sketch(size, image=image, line=max(2, round(sides / 300)), font=max(10, round(sides / 48)))
    captions: List[Tuple[Optional[Colour], str]] = []
    overlay = None
    if answer.map is not None and image is None:
        overlay = _colour_map(answer.map)
        captions = [(None if n is None else colour_of(n), text) for n, text in describe_map(answer)]
    elif not len(answer) and image is None:
        captions = [(None, line) for line in describe(answer)]
    return replace(plain, overlay=overlay, captions=tuple(captions), shapes=tuple(_list_shapes(answer)))


def _list_shapes(answer: Answer) -> List[Shape]:
    """Return the shapes of all objects: masks under boxes, the best object on top, and labels above all."""
    masks, shapes, labels = [], [], []
    for place in reversed(range(len(answer))):
        colour = colour_of(int(answer.classes[place]))
        corners = _find_corners(answer, place)
        if not np.isfinite(corners).all():
            continue
        if answer.masks is not None:
            masks.append(Shape("mask", corners, colour, answer.masks[place]))
        shapes.append(Shape("area", corners, colour))
        if answer.keypoints is not None:
            shapes += _list_keypoints(answer.keypoints[place], colour)
        text = f"{answer.label_of(int(answer.classes[place]))} {answer.scores[place]:.2f}"
        labels.append(Shape("label", corners[corners[:, 1].argmin()][None], colour, text))
        if answer.angles is None and answer.polygons is None:
            labels[-1] = replace(labels[-1], points=corners[:1])
    return masks + shapes + labels


def _find_corners(answer: Answer, place: int) -> Any:
    """Return the outline of an object [P, 2]: its polygon, or the corners of its box after its rotation."""
    if answer.polygons is not None and len(answer.polygons[place]):
        return np.asarray(answer.polygons[place], np.float64)
    x1, y1, x2, y2 = answer.boxes[place]
    corners = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], np.float64)
    if answer.angles is None:
        return corners
    cos, sin = np.cos(answer.angles[place]), np.sin(answer.angles[place])
    centre = corners.mean(axis=0)
    return (corners - centre) @ np.array([[cos, sin], [-sin, cos]]) + centre


def _list_keypoints(keypoints: Any, colour: Colour) -> List[Shape]:
    visible = (keypoints[:, 2] >= _VISIBLE) & np.isfinite(keypoints).all(axis=1)
    pairs = _SKELETON if len(keypoints) == 17 else ()
    lines = [Shape("line", keypoints[[a, b], :2], colour) for a, b in pairs if visible[a] and visible[b]]
    return lines + [Shape("dot", point[None, :2], colour) for point in keypoints[visible]]


def _colour_map(values: Any) -> Any:
    """Return a map [H, W] of classes or values as colours, uint8 [H, W, 4]."""
    colours = np.empty((*values.shape, 4), np.uint8)
    colours[..., 3] = round(255 * _TRANSLUCENT)
    if values.dtype.kind in "iu":
        numbers, places = np.unique(values, return_inverse=True)
        table = np.array([colour_of(int(number)) for number in numbers], np.uint8)
        colours[..., :3] = table[places.reshape(values.shape)]
        return colours
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 0.0)
    share = np.clip(np.where(finite, values - low, 0) / ((high - low) or 1.0), 0, 1) * (len(_SCALE) - 1)
    for channel in range(3):
        colours[..., channel] = np.interp(share, np.arange(len(_SCALE)), _SCALE[:, channel])
    colours[..., 3] = np.where(finite, round(255 * 0.7), 0)
    return colours


def fade(mask: Any, colour: Colour) -> Any:
    """Return a mask bool [H, W] as a translucent layer uint8 [H, W, 4]."""
    layer = np.zeros((*mask.shape, 4), np.uint8)
    layer[mask] = (*colour, round(255 * _TRANSLUCENT))
    return layer
