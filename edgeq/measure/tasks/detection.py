"""Measure object detection: COCO's mean average precision of a detector head's boxes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import suppress
from numpy.typing import NDArray

from edgeq.data.images import find_frame
from edgeq.data.sample import Sample
from edgeq.errors import DataError, UsageError
from edgeq.measure.average_precision import Matches, mean_average_precisions
from edgeq.measure.boxes import BoxUnit, Detections, Floats, find_box_unit, in_pixels
from edgeq.measure.coco import (
    CocoAnnotations,
    Image,
    list_results,
    load_annotations,
    load_package,
    match_image,
    mean_average_precision,
)
from edgeq.measure.decoders import REGISTRY as HEADS
from edgeq.measure.decoders import Decode, Decoder, FamilyDecode, load_decoder, recognise
from edgeq.measure.inference import Outputs
from edgeq.measure.operating_point import ScoredObjects
from edgeq.measure.skill import Skill, score_interval
from edgeq.measure.task import TaskKind, TaskOptions
from edgeq.measure.task_inputs import pick_input
from edgeq.util.display import Displayed
from edgeq.util.registry import DECODERS
from edgeq.util.user_code import names_function


@dataclass(frozen=True)
class Detection(Displayed):
    """Compare detected boxes with annotations. Each sample is one image, which the annotations list by its file name.

    Boxes are mapped back to the original image, using the geometry that resize or letterbox stored in the sample's
    context. They are not clipped to the image.

    Attributes:
        annotations: the annotated objects.
        decoder: decoder for the model's head. With None, the outputs decide (`settled`).
        usual: name of the preprocessing that is usual for the head; "" if none is known.
        confidence: score that a candidate must exceed to be kept. The default is low, because average precision also
            counts low-scoring boxes.
        iou: overlap above which the lower-scoring of two boxes of one class is dropped. With None, it is 0.65, and a
            family that suppresses nothing keeps all boxes.
        limit: maximum number of detections for each image; COCO counts 100.
        threshold: score from which a user counts a box, for the operating point; None if the head is not known.
        reads_answers: the metric reads all that the outputs say, so it decides about a build, whatever the noise.
        unit: unit of the decoder's boxes. With None, the outputs decide (`settled`); until then, it is "pixels".
    """

    annotations: CocoAnnotations
    decoder: Decode | None
    confidence: float = 0.01
    iou: float | None = None
    limit: int = 100
    name: str = "detection"
    primary: str = "mAP50-95"
    higher_is_better: bool = True
    usual: str = ""
    unit: BoxUnit | None = None
    threshold: float | None = None
    reads_answers: bool = True

    def __post_init__(self) -> None:
        # A threshold outside this range would keep everything or nothing.
        for option, value in (("confidence", self.confidence), ("iou", self.iou)):
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"⟨{option}⟩ is {value}", "Give a number from 0 to 1")

    def with_head(self, head: Head | None) -> Detection:
        """Return the task with the decoder of a model's head, if it has none yet and the head's answers are boxes."""
        task = self if head is None else replace(self, threshold=head.thresholds.get("confidence"))
        decode = FamilyDecode.of(head) if head is not None and self.decoder is None else None
        return task if decode is None else replace(task, decoder=decode, usual=decode.family.preprocess)

    def settled(self, pairs: Iterable[tuple[Sample, Outputs]]) -> tuple[Detection, str]:
        """Return the task with the decoder that fits the first sample's outputs, with the unit of its boxes, and a text
        about the choice ("" for none).

        If several decoders fit, the decoder whose boxes are correct on the samples is chosen.

        Raises:
            UsageError: no decoder fits the outputs, or several are equally good.
        """
        pairs = iter(pairs)
        if self.decoder is not None:
            task = self if self.unit is not None else self._with_unit(pairs)
            return task, task._describe_unit()
        sample, outputs = first_pair = next(pairs)
        decoders = recognise(outputs, input_size(sample), tuple(sample.inputs))
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
        decided = f"the outputs {shapes}"
        rows = [first_pair]
        # Several heads have outputs of the same form. Only the boxes on labelled samples tell them apart.
        if len(decoders) > 1:
            rows += pairs
            values = {decoder.name: self._precision(decoder, rows) for decoder in decoders}
            best, second, *_ = sorted(values.values(), reverse=True)
            # A smaller lead may be chance on so few samples.
            if best > 2 * second:
                decoders = [decoder for decoder in decoders if values[decoder.name] == best]
                decided = f"its mAP of {best:.4f} on {len(rows)} samples (the next {second:.4f})"
        if len(decoders) != 1:
            names = " and ".join(decoder.name for decoder in decoders)
            several = f"{names} both fit" if names else "no decoder is known for"
            raise UsageError(f"{several} the outputs {shapes}", f"Choose {_DECODERS}")
        (decoder,) = decoders
        settled_task = replace(self, decoder=decoder.decode, usual=decoder.preprocess)._with_unit(chain(rows, pairs))
        unit = settled_task._describe_unit()
        choice = f"decoder {decoder.name}, by {decided}; ⟨decoder⟩ sets another"
        return settled_task, f"{choice}; {unit}" if unit else choice

    def _with_unit(self, pairs: Iterable[tuple[Sample, Outputs]]) -> Detection:
        """Return the task with the unit of the decoder's boxes. Samples are read until one has a box."""
        assert self.decoder is not None, "the caller made sure"
        if isinstance(self.decoder, FamilyDecode):
            return self._with_settled_family(self.decoder, pairs)
        for sample, outputs in pairs:
            size = input_size(sample)
            candidates = self.decoder(outputs, size)
            # Candidates with low scores may lie anywhere.
            unit = find_box_unit(candidates.take(candidates.scores > self.confidence).boxes, size)
            if unit is not None:
                return replace(self, unit=unit)
        return replace(self, unit="pixels")

    def _with_settled_family(self, decode: FamilyDecode, pairs: Iterable[tuple[Sample, Outputs]]) -> Detection:
        """Return the task with a family that is settled on the outputs of a sample with boxes, if there is one."""
        settled = decode
        for sample, outputs in pairs if decode.head is None else ():
            size = input_size(sample)
            settled = decode.settled(outputs, size, tuple(sample.inputs)) or decode
            candidates = settled(outputs, size)
            if (candidates.boxes[candidates.scores > self.confidence] != 0).any():
                break
        return replace(self, decoder=settled, unit="pixels")

    def _describe_unit(self) -> str:
        """Return a sentence about a unit of the boxes that is unusual for the head, or ""."""
        decode = self.decoder
        if not isinstance(decode, FamilyDecode):
            return _UNITS[self.unit or "pixels"]
        # Families name the unit only where it is unusual.
        unit = decode.head.parameters.get("unit") if decode.head is not None else None
        return {"share": _UNITS["shares"], "pixel": _UNITS["pixels, scaled"]}.get(str(unit), "")

    def _precision(self, decoder: Decoder, rows: Sequence[tuple[Sample, Outputs]]) -> float:
        """Return the mean average precision with one decoder. Return 0 if some outputs do not belong to its head."""
        try:
            meter = replace(self, decoder=decoder.decode)._with_unit(rows).start()
            for sample, outputs in rows:
                meter.update(outputs, sample)
            return meter.result()[self.primary]
        except (DataError, UsageError):
            return 0.0

    def start(self) -> DetectionMeter:
        """Return a meter for mean average precision."""
        if self.decoder is None:
            raise UsageError("detection needs a decoder", f"Choose {_DECODERS}")
        return DetectionMeter(self)


_UNITS: Mapping[BoxUnit, str] = {
    "pixels": "",
    "shares": "the model's boxes are shares of the image's size (0 to 1), not pixels",
    "pixels, scaled": "the model's boxes are pixels, not shares of the image's size",
}
# The overlap at which YOLOX and others measure COCO's metrics.
_IOU = 0.65
_DECODERS = f"⟨decoder⟩ {', '.join(DECODERS.names())}, or path.py:function"


def make_detection(options: TaskOptions) -> Detection:
    """Return the detection task for the command line's options. The options must include annotations."""
    if options.annotations is None:
        fix = "Give a COCO instances file with ⟨annotations⟩, or put it next to the images; edgeq then finds the rest"
        raise UsageError("detection needs annotations", fix)
    thresholds: Mapping[str, Any] = {k: v for k, v in options.given().items() if k in ("confidence", "iou")}
    annotations = load_annotations(options.annotations)
    if options.decoder is None:
        return Detection(annotations, None, **thresholds)
    usual = "" if names_function(options.decoder) else HEADS.load(options.decoder).preprocess
    return Detection(annotations, load_decoder(options.decoder), usual=usual, **thresholds)


# Number of other images whose boxes are compared with an image's objects, to find out how many overlap by chance.
_SHIFTS = 4


class DetectionMeter:
    """Measure the mean average precision of boxes. See `edgeq.measure.task.Meter`."""

    def __init__(self, task: Detection) -> None:
        self._task = task
        self._package = load_package()  # If no COCO package is installed, this fails now, before minutes of inference.
        self._detections: list[tuple[Image, Detections]] = []
        self._matches: list[Mapping[int, Matches]] = []
        self._image_ids: set[int] = set()

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Decode and suppress the boxes of one image, and map them to pixels of the original image.

        Raises:
            DataError: the annotations lack the image or a class, or the image was already added.
        """
        image = self._image(sample)
        size = input_size(sample)
        decode = self._task.decoder
        assert decode is not None, "the task made sure"
        family = decode if isinstance(decode, FamilyDecode) else None
        in_image = family is not None and family.in_image
        if in_image and (frame := find_frame(sample.context)) is not None:
            size = frame.original
        candidates = in_pixels(decode(outputs, size), self._task.unit or "pixels", size)
        categories = len(self._task.annotations.categories)
        # Such a class shows that the annotations are not those of the model's training.
        if len(candidates) and candidates.classes.max() >= categories:
            raise DataError(
                f"{self._task.annotations.source} has {categories} categories, but the model's classes go up to "
                f"{candidates.classes.max()}",
                "Use the annotations that the model was trained for, or a decoder that maps the classes",
            )
        iou = self._task.iou
        if iou is None and (family is None or family.suppressed):
            iou = _IOU
        detections = suppress(candidates, self._task.confidence, iou, self._task.limit)
        boxes = detections.boxes if in_image else _map_to_image(detections.boxes, sample, image, size)
        self._detections.append((image, Detections(boxes, detections.scores, detections.classes)))

    def collected(self) -> list[tuple[Image, Detections]]:
        """Return the images and their detections."""
        return self._detections

    def take(self, collected: list[tuple[Image, Detections]]) -> None:
        """Add the images of another meter.

        Raises:
            DataError: this meter already has one of the images.
        """
        for image, _ in collected:
            if image.id in self._image_ids:
                raise DataError(f"the image with id {image.id} comes twice", "Give each image once")
            self._image_ids.add(image.id)
        self._detections += collected

    def result(self) -> Mapping[str, float]:
        """Return COCO's metrics, each from 0 to 1. "mAP50-95" is one of them."""
        return mean_average_precision(self._task.annotations, self._detections, self._package)

    def skill(self) -> Skill | None:
        """Return how many objects are found, in comparison with the objects of other images. Return None without
        objects.

        Objects of one image are alike, so the upper limit counts images instead of objects.
        """
        hits, objects = self._overlapping(0)
        if not objects:
            return None
        # Objects of a data set have usual sizes and places, so boxes of other images overlap some of them by chance.
        shifts = range(1, min(len(self._detections), _SHIFTS + 1))
        chance = sum(self._overlapping(shift)[0] for shift in shifts) / (objects * max(1, len(shifts)))
        images = sum(any(match.objects for match in image.values()) for image in self._matched())
        low, _ = score_interval(hits, objects)
        _, high = score_interval(images * hits / objects, images)
        figure = f"the boxes overlap {hits} of {objects} objects by half"
        fix = (
            "Check ⟨preprocess⟩ and ⟨decoder⟩, and that the annotations' categories are in the order of the model's "
            "classes"
        )
        return Skill(figure, chance, low, high, f"{chance * objects:.1f} objects", fix)

    def _overlapping(self, shift: int) -> tuple[int, int]:
        """Return how many objects a box of their class overlaps by half or more, and the number of objects. Each image
        gets the boxes of the image that is `shift` places before it.
        """
        matched = self._matched()
        if shift:
            moved = zip(self._detections, self._detections[-shift:] + self._detections[:-shift], strict=True)
            matched = [match_image(self._task.annotations, image, boxes) for (image, _), (_, boxes) in moved]
        every = [match for image in matched for match in image.values()]
        return sum(int(match.right[0].sum()) for match in every), sum(match.objects for match in every)

    def _matched(self) -> list[Mapping[int, Matches]]:
        """Return the matches of each image with its own objects."""
        # Matches are kept, because skill and halves both need them.
        self._matches += [
            match_image(self._task.annotations, *image_detections)
            for image_detections in self._detections[len(self._matches) :]
        ]
        return self._matches

    def scored(self) -> ScoredObjects:
        """Return the scores of the boxes so far, and whether each overlaps a free object of its class by half."""
        parts = []
        for image in self._matched():
            matches = list(image.values())
            scores, right = (
                np.concatenate([part[~match.ignored[0]] for match, part in zip(matches, column, strict=True)] or [[]])
                for column in ([match.scores for match in matches], [match.right[0] for match in matches])
            )
            parts.append((scores, right, sum(match.objects for match in matches)))
        return ScoredObjects.join(parts)

    def boxes(self) -> list[dict[str, Any]]:
        """Return the detections in the images so far, as COCO's list of results."""
        return list_results(self._task.annotations, self._detections)

    def resampled(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return mAP50-95 over each half. `halves` is [H, images]. The value is NaN for a half whose images have no
        object.
        """
        matches = self._matched()
        # COCO's packages sort images by id. For equal scores, this order decides.
        order = sorted(range(len(self._detections)), key=lambda i: self._detections[i][0].id)
        return mean_average_precisions([matches[i] for i in order], halves[:, order])

    def _image(self, sample: Sample) -> Image:
        context = sample.context
        file = str(context.get("path", context.get("file", sample.name)))
        try:
            image = self._task.annotations.image(file)
        except DataError as error:
            raise DataError(f"{sample.name}: {error.problem}", error.fix) from error
        if image.id in self._image_ids:
            raise DataError(f"{sample.name}: image {image.id} comes twice", "Give each image once")
        self._image_ids.add(image.id)
        return image


def input_size(sample: Sample) -> tuple[int, int]:
    """Return the width and height of the model's image input.

    It must be the only input. Its shape must be [1, C, H, W] or [1, H, W, C], where C is 1, 3 or 4.

    Raises:
        DataError: the input is not one image.
    """
    shape = pick_input(sample).shape
    if len(shape) == 4 and shape[0] == 1:
        if shape[1] in (1, 3, 4):
            return shape[3], shape[2]
        if shape[3] in (1, 3, 4):
            return shape[2], shape[1]
    raise DataError(f"{sample.name}: input of shape {list(shape)} is not one image", "Detection takes one image a run")


def _map_to_image(boxes: Floats, sample: Sample, image: Image, size: tuple[int, int]) -> Floats:
    """Convert boxes [N, 4] from pixels of the model's input to pixels of the original image."""
    original = sample.context.get("original_size")
    # An image of another size is another image with the same name.
    if image.size is not None and original is not None and tuple(original) != image.size:
        raise DataError(
            f"{sample.name} is {original[0]}x{original[1]}, but annotated as {image.size[0]}x{image.size[1]}",
            "Use images and annotations of the same data set",
        )
    if (frame := find_frame(sample.context)) is not None:
        mapped: Floats = frame.to_original(boxes)
        return mapped
    if image.size is not None and image.size != size:
        raise DataError(
            f"{sample.name}: boxes cannot be mapped from the model's {size[0]}x{size[1]} to the image's "
            f"{image.size[0]}x{image.size[1]}",
            "Read image files with a ⟨preprocess⟩ that resizes or letterboxes",
        )
    return boxes


TASK = TaskKind(
    "detection",
    "COCO mean average precision of boxes",
    make_detection,
    frozenset({"annotations", "decoder", "confidence", "iou"}),
)
