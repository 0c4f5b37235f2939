"""Hold what a model says about one input: objects, text, classes, a map or a vector."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

Array = Any
"""A numpy array. Python 3.9's numpy types cannot be written in annotations that are evaluated."""


def _empty(*shape: int) -> Array:
    return np.zeros(shape, np.float64)


@dataclass(frozen=True)
class Answer:
    """Hold the answer for one input. Fields that do not apply are empty or None.

    All positions are in pixels of the image as stored (x to the right, y down, from its upper left corner). They are
    not clipped to the image.

    Attributes:
        task: task of the head's family, such as "detect".
        boxes: float64 [N, 4], x1, y1, x2, y2, best score first. For rotated boxes, the box before its rotation.
        scores: float64 [N], from 0 to 1.
        classes: int64 [N].
        names: the name of each object's class, or its number as text if there are no labels.
        angles: float64 [N], clockwise in radians around the box's centre; None if boxes are upright.
        polygons: float64 [N, P, 2], the corners of a region, such as a line of text; None without regions.
        masks: bool [N, H, W] in the size of the stored image; None if objects have no masks.
        keypoints: float64 [N, K, 3]: x, y, and the score or visibility from 0 to 1; None without keypoints.
        keypoint_names: name of each of the K keypoints; may be empty.
        text: the recognised text; None if the model reads none.
        top: class number → score of each class that the model gives, best first. Empty unless the task is one of
            classes.
        map: [H, W] class numbers (int64), or values such as depth or alpha (float64), or an image uint8 [H, W, 3];
            None if there is none.
        vector: float64 [D], an embedding, regressed values or probabilities of time steps; None if there is none.
        maps: output name → further map as in `map`, of a model with several outputs that are maps.
        confidence: how sure the model is of its text, from 0 to 1, or how anomalous the input is; None if it does not
            say.
        segments: float64 [S, 2], start and end of parts of a recording in seconds; None if the input is none.
        labels: names of the classes that numbers refer to; may be empty.
        image_size: (width, height) of the stored image; None if the input was not an image.
    """

    task: str
    boxes: Array = field(default_factory=lambda: _empty(0, 4))
    scores: Array = field(default_factory=lambda: _empty(0))
    classes: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    angles: Optional[Array] = None
    polygons: Optional[Array] = None
    masks: Optional[Array] = None
    keypoints: Optional[Array] = None
    keypoint_names: Tuple[str, ...] = ()
    text: Optional[str] = None
    top: Mapping[int, float] = field(default_factory=dict)
    map: Optional[Array] = None
    vector: Optional[Array] = None
    maps: Mapping[str, Array] = field(default_factory=dict)
    confidence: Optional[float] = None
    segments: Optional[Array] = None
    labels: Tuple[str, ...] = ()
    image_size: Optional[Tuple[int, int]] = None

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def names(self) -> Tuple[str, ...]:
        """Return the name of each object's class."""
        return tuple(self.label_of(int(number)) for number in self.classes)

    def label_of(self, number: int) -> str:
        """Return the name of a class, or its number as text if it has no name."""
        return self.labels[number] if 0 <= number < len(self.labels) else str(number)

    def to_json(self) -> Dict[str, Any]:
        """Return plain JSON values, with the names that Ultralytics' results and COCO use."""
        record: Dict[str, Any] = {"task": self.task}
        if self.image_size is not None:
            record["image"] = {"width": self.image_size[0], "height": self.image_size[1]}
        if self.text is not None:
            record["text"] = self.text
        if self.confidence is not None:
            record["confidence"] = _number(self.confidence)
        if self.top:
            record["classes"] = [
                {"name": self.label_of(number), "class": number, "confidence": _number(score)}
                for number, score in self.top.items()
            ]
        if self.map is not None:
            record["map"] = _describe_map(self.map, self.labels)
        if self.maps:
            record["maps"] = {name: _describe_map(values, ()) for name, values in self.maps.items()}
        if self.segments is not None:
            record["segments"] = [{"start": _number(start), "end": _number(end)} for start, end in self.segments]
        if self.vector is not None:
            record["vector"] = [_number(value) for value in self.vector]
        if (self.text is None and not self.top and self.map is None and self.vector is None) or len(self):
            record["objects"] = [self._object(place) for place in range(len(self))]
        return record

    def _object(self, place: int) -> Dict[str, Any]:
        number = int(self.classes[place])
        entry: Dict[str, Any] = {
            "name": self.label_of(number),
            "class": number,
            "confidence": _number(self.scores[place]),
            "box": {key: _number(value) for key, value in zip(("x1", "y1", "x2", "y2"), self.boxes[place])},
        }
        if self.angles is not None:
            entry["angle"] = _number(self.angles[place])
        if self.polygons is not None:
            entry["segments"] = _points(self.polygons[place])
        if self.masks is not None:
            # Import where it is needed, because most answers have no masks.
            from edgeq_device.answers.contours import trace

            entry["area"] = int(self.masks[place].sum())
            entry["segments"] = _points(trace(self.masks[place]))
        if self.keypoints is not None:
            entry["keypoints"] = {
                "x": [_number(value) for value in self.keypoints[place, :, 0]],
                "y": [_number(value) for value in self.keypoints[place, :, 1]],
                "visible": [_number(value) for value in self.keypoints[place, :, 2]],
                **({"names": list(self.keypoint_names)} if self.keypoint_names else {}),
            }
        return entry


def _points(polygon: Array) -> Dict[str, List[Optional[float]]]:
    return {"x": [_number(x) for x, _ in polygon], "y": [_number(y) for _, y in polygon]}


def _number(value: Any) -> Optional[float]:
    """Return a number for JSON, with six digits. JSON has no NaN or infinity, so these become None."""
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None


def _describe_map(values: Array, labels: Sequence[str]) -> Dict[str, Any]:
    """Return a summary of a map. The map itself is an image, which `--draw` writes."""
    record: Dict[str, Any] = {"shape": list(values.shape), "dtype": str(values.dtype)}
    if values.dtype.kind in "iu" and values.ndim == 2:
        numbers, counts = np.unique(values, return_counts=True)
        record["shares"] = {
            labels[int(n)] if 0 <= int(n) < len(labels) else str(int(n)): _number(count / values.size)
            for n, count in zip(numbers, counts)
        }
    elif values.size:
        finite = values[np.isfinite(values)]
        if finite.size:
            record.update(min=_number(finite.min()), mean=_number(finite.mean()), max=_number(finite.max()))
    return record
