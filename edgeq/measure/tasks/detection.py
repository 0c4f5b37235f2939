"""Object detection: COCO's mean average precision of a detector head's boxes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.data.records import Sample, to_original
from edgeq.errors import DataError, UsageError
from edgeq.measure.boxes import Detections, Floats, suppress
from edgeq.measure.coco import (
    CocoAnnotations,
    Image,
    Matches,
    guesses,
    load_annotations,
    load_package,
    match_image,
    mean_average_precision,
    mean_average_precisions,
)
from edgeq.measure.decoders import Decode, load_decoder
from edgeq.measure.latency import Outputs
from edgeq.measure.task import TaskKind, TaskOptions, only_input
from edgeq.util.display import Displayed
from edgeq.util.registry import DECODERS


@dataclass(frozen=True)
class Detection(Displayed):
    """One image a sample, known to the annotations by its file's name.

    Boxes go back to the original image by the geometry that resize or letterbox left in the sample's context, and are
    not clipped to it.

    Attributes:
        annotations: the truth.
        decoder: the model's head.
        confidence: candidates that score at most this are dropped. Low, as average precision counts
            low-scored boxes too.
        iou: overlap above which the lower-scored of two boxes of a class is dropped.
        limit: detections kept an image; COCO counts 100.
    """

    annotations: CocoAnnotations
    decoder: Decode
    confidence: float = 0.01
    iou: float = 0.65
    limit: int = 100
    name: str = "detection"
    primary: str = "mAP50-95"
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        for option, value in (("confidence", self.confidence), ("iou", self.iou)):
            if not 0 <= value <= 1:
                raise UsageError(f"--{option} is {value}", "It lies between 0 and 1")

    def start(self) -> DetectionMeter:
        """A meter of mean average precision."""
        return DetectionMeter(self)


def detection(options: TaskOptions) -> Detection:
    """The task of the command line's options. Annotations and a decoder are needed."""
    if options.annotations is None:
        raise UsageError("detection needs annotations", "Give a COCO instances file with --annotations")
    if options.decoder is None:
        raise UsageError(
            "detection needs a decoder", f"Choose --decoder {', '.join(DECODERS.names())}, or path.py:function"
        )
    thresholds = {k: v for k, v in options.given().items() if k in ("confidence", "iou")}
    settings: Mapping[str, Any] = thresholds
    return Detection(load_annotations(options.annotations), load_decoder(options.decoder), **settings)


class DetectionMeter:
    def __init__(self, task: Detection) -> None:
        self._task = task
        self._package = load_package()  # early: before minutes of inference
        self._found: list[tuple[Image, Detections]] = []
        self._matches: list[Mapping[int, Matches]] = []
        self._seen: set[int] = set()

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Decode and suppress the boxes of one image, in pixels of the original.

        Raises:
            DataError: an image that the annotations lack or that comes twice, or a class that they lack.
        """
        image = self._image(sample)
        size = input_size(sample)
        candidates = self._task.decoder(outputs, size)
        categories = len(self._task.annotations.categories)
        if len(candidates) and candidates.classes.max() >= categories:
            raise DataError(
                f"{self._task.annotations.source} has {categories} categories, the model's classes go to "
                f"{candidates.classes.max()}",
                "Use the annotations that the model was trained for, or a decoder that maps the classes",
            )
        kept = suppress(candidates, confidence=self._task.confidence, iou=self._task.iou, limit=self._task.limit)
        boxes = _placed(kept.boxes, sample, image, size)
        self._found.append((image, Detections(boxes, kept.scores, kept.classes)))

    def collected(self) -> list[tuple[Image, Detections]]:
        """Images and what was found in them."""
        return self._found

    def take(self, collected: list[tuple[Image, Detections]]) -> None:
        """Add the images of another meter.

        Raises:
            DataError: one that was there already.
        """
        for image, _ in collected:
            if image.id in self._seen:
                raise DataError(f"the image with id {image.id} comes twice", "Give each image once")
            self._seen.add(image.id)
        self._found += collected

    def result(self) -> Mapping[str, float]:
        """COCO's metrics, "mAP50-95" among them, from 0 to 1."""
        return mean_average_precision(self._task.annotations, self._found, self._package)

    def boxes(self) -> list[dict[str, Any]]:
        """COCO's list of results: what was found in the images seen."""
        return guesses(self._task.annotations, self._found)

    def resampled(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """mAP50-95 over each of the halves [H, images]; NaN where the images of one have no object."""
        self._matches += [match_image(self._task.annotations, *one) for one in self._found[len(self._matches) :]]
        # COCO's packages take images by their ids, which decides between equal scores.
        order = sorted(range(len(self._found)), key=lambda i: self._found[i][0].id)
        return mean_average_precisions([self._matches[i] for i in order], halves[:, order])

    def _image(self, sample: Sample) -> Image:
        context = sample.context
        file = str(context.get("path", context.get("file", sample.name)))
        try:
            image = self._task.annotations.image(file)
        except DataError as error:
            raise DataError(f"{sample.name}: {error.problem}", error.fix) from error
        if image.id in self._seen:
            raise DataError(f"{sample.name}: image {image.id} comes twice", "Give each image once")
        self._seen.add(image.id)
        return image


def input_size(sample: Sample) -> tuple[int, int]:
    """Width and height of the model's image input: the only one, [1, C, H, W] or [1, H, W, C] with C of 1, 3 or 4.

    Raises:
        DataError: no such input.
    """
    shape = only_input(sample).shape
    if len(shape) == 4 and shape[0] == 1:
        if shape[1] in (1, 3, 4):
            return shape[3], shape[2]
        if shape[3] in (1, 3, 4):
            return shape[2], shape[1]
    raise DataError(f"{sample.name}: input of shape {list(shape)} is not one image", "Detection takes one image a run")


def _placed(boxes: Floats, sample: Sample, image: Image, size: tuple[int, int]) -> Floats:
    """Boxes [N, 4] from pixels of the model's input to pixels of the original image."""
    original = sample.context.get("original_size")
    if image.size is not None and original is not None and tuple(original) != image.size:
        raise DataError(
            f"{sample.name} is {original[0]}x{original[1]}, annotated as {image.size[0]}x{image.size[1]}",
            "Take images and annotations of one set",
        )
    if "scale" in sample.context:
        return to_original(boxes, sample.context)
    if image.size is not None and image.size != size:
        raise DataError(
            f"{sample.name}: no way back from the model's {size[0]}x{size[1]} to the image's "
            f"{image.size[0]}x{image.size[1]}",
            "Read image files with a --preprocess that resizes or letterboxes",
        )
    return boxes


TASK = TaskKind(
    "detection",
    "COCO mean average precision of boxes",
    detection,
    frozenset({"annotations", "decoder", "confidence", "iou"}),
)
