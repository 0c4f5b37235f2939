"""Compute the overlap of boxes, non-maximum suppression and COCO's metrics.

A box is x1, y1, x2, y2 (left, top, right, bottom) in pixels. The boxes in COCO's files are x, y, width, height.

`mean_average_precision` computes COCO's metrics with faster-coco-eval or pycocotools, whichever is installed.

`mean_average_precisions` computes COCO's mAP50-95 for many selections of the same images. The detections of each image
are matched with its objects only once. The result is the same as that of the COCO packages (area "all", 100 detections
per image), but the packages need half a second for each selection of 128 images. The rules of the packages are:

- Detections are processed in order of their scores, the highest first. A detection takes the free object of its
  category that it overlaps most, if the overlap reaches the threshold.
- Several detections may take the same object if it is marked as crowd. These detections count neither as correct nor as
  wrong.
- The precision at each of 101 recalls is the highest precision at that recall or a higher one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from edgeq_device.system.files import read_file
from numpy.typing import NDArray

from edgeq.errors import DataError, RuntimeUnavailableError
from edgeq.util.record_files import is_longer

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Detections:
    """Hold the boxes of one image: boxes float64 [N, 4], scores float64 [N], classes int64 [N]."""

    boxes: Floats
    scores: Floats
    classes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, which: NDArray[Any]) -> Detections:
        """Return the detections at some indices, or those for which a mask [N] is true."""
        return Detections(self.boxes[which], self.scores[which], self.classes[which])


def best_class(boxes: NDArray[Any], scores: NDArray[Any]) -> Detections:
    """Return each box with its highest-scoring class. `boxes` is [N, 4] and `scores` [N, classes]."""
    classes = scores.argmax(axis=1)
    return Detections(
        np.asarray(boxes, np.float64),
        np.asarray(scores[np.arange(len(scores)), classes], np.float64),
        classes.astype(np.int64),
    )


def centre_to_corners(boxes: NDArray[Any]) -> Floats:
    """Convert boxes [N, 4] from (centre x, centre y, width, height) to corners."""
    centre, half = np.asarray(boxes[:, :2], np.float64), np.asarray(boxes[:, 2:4], np.float64) / 2
    return np.concatenate([centre - half, centre + half], axis=1)


BoxUnit = Literal["pixels", "shares", "pixels, scaled"]
"""Unit of decoded boxes: pixels of the model's input, shares of its width and height, or pixels that a decoder for
shares has multiplied by the size.
"""
# Shares are at most 1, apart from boxes that reach over the edge. Boxes in pixels reach much further than two pixels.
_LARGEST_SHARE = 2.0
# Boxes whose median reaches further than this many widths or heights of the image are not in pixels.
_FAR_OUTSIDE = 8.0
_SMALLEST_SIDE = 16


def box_unit(boxes: NDArray[Any], size: tuple[int, int]) -> BoxUnit | None:
    """Return the unit of the decoded boxes [N, 4] of one image. The model's input has `size` (width, height) in pixels.

    Return None if no box shows the unit: there are none, or all are empty.
    """
    reach = np.abs(np.asarray(boxes, np.float64)[np.isfinite(boxes).all(axis=1)]).reshape(-1, 2, 2).max(axis=1)
    if min(size) < _SMALLEST_SIDE or not reach.any():
        return None
    if reach.max() <= _LARGEST_SHARE:
        return "shares"
    return "pixels, scaled" if np.median((reach / size).max(axis=1)) > _FAR_OUTSIDE else "pixels"


def in_pixels(detections: Detections, unit: BoxUnit, size: tuple[int, int]) -> Detections:
    """Return detections with boxes in pixels of the model's input, whose `size` is (width, height)."""
    if unit == "pixels":
        return detections
    factor = np.tile(np.asarray(size, np.float64), 2)
    boxes = detections.boxes * factor if unit == "shares" else detections.boxes / factor
    return replace(detections, boxes=boxes)


def overlap(box: Floats, boxes: Floats) -> Floats:
    """Return the intersection over union of one box [4] with each of the boxes [N, 4]. Return 0 if the union has no
    area.

    A box whose corners are swapped has no area.
    """
    edges = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    sizes = (high - low for low, high in (edges, (box[:2], box[2:]), (boxes[:, :2], boxes[:, 2:])))
    common, own, others = (np.clip(size, 0, None).prod(axis=-1) for size in sizes)
    union = own + others - common
    shared: Floats = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
    return shared


def nms(found: Detections, iou: float, limit: int) -> NDArray[np.int64]:
    """Return the indices of the detections to keep, in descending order of score, at most `limit`.

    The detections are processed in this order. A detection is kept unless it overlaps a kept detection of the same
    class by more than `iou`. Of detections with equal scores, the earlier one comes first.
    """
    order = np.argsort(-found.scores, kind="stable")
    boxes, classes = found.boxes[order], found.classes[order]
    left = np.arange(len(order))
    kept: list[int] = []
    while left.size and len(kept) < limit:
        first, remaining = left[0], left[1:]
        kept.append(int(order[first]))
        dropped = (classes[remaining] == classes[first]) & (overlap(boxes[first], boxes[remaining]) > iou)
        left = remaining[~dropped]
    return np.array(kept, np.int64)


def suppress(candidates: Detections, *, confidence: float, iou: float, limit: int) -> Detections:
    """Return the best candidates of a detector head, at most `limit`.

    The returned candidates are finite, have a score above `confidence`, and are not suppressed by other candidates
    (`nms`).
    """
    usable = np.isfinite(candidates.boxes).all(axis=1) & (candidates.scores > confidence)
    strong = candidates.take(usable)
    return strong.take(nms(strong, iou, limit))


THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)
_LARGEST_AREA = 1e10
_CERTAIN = 1 - 1e-10

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Matches:
    """Hold the matches between the detections of one category in one image and the objects of that category.

    Attributes:
        scores: scores of the detections, [D], descending.
        right: whether each detection took an object, [thresholds, D].
        ignored: whether each detection is left out of the count, [thresholds, D].
        objects: number of objects, without those marked as crowd.
    """

    scores: Floats
    right: Flags
    ignored: Flags
    objects: int


def match(boxes: Floats, scores: Floats, objects: Floats, crowd: Flags) -> Matches:
    """Match detections with objects of the same category in one image.

    Args:
        boxes: boxes of the detections, [D, 4] as x, y, width, height in pixels.
        scores: scores of the detections, [D].
        objects: boxes of the objects, [G, 4] in the same form.
        crowd: whether each object is marked as crowd, [G].
    """
    order = np.argsort(-scores, kind="stable")
    boxes, scores = boxes[order], scores[order]
    last = np.argsort(crowd, kind="stable")
    objects, crowd = objects[last], crowd[last]
    area = boxes[:, 2] * boxes[:, 3]
    right = np.zeros((len(THRESHOLDS), len(boxes)), np.bool_)
    ignored = np.repeat(((area < 0) | (area > _LARGEST_AREA))[None], len(THRESHOLDS), axis=0)
    overlaps = _overlaps(boxes, objects, crowd) if len(objects) else np.zeros((len(boxes), 0))
    for row, threshold in enumerate(THRESHOLDS if (overlaps >= THRESHOLDS[0]).any() else ()):
        free = np.ones(len(objects), np.bool_)
        for d in np.flatnonzero((overlaps >= min(threshold, _CERTAIN)).any(axis=1)):
            usable = (overlaps[d] >= min(threshold, _CERTAIN)) & (free | crowd)
            if (usable & ~crowd).any():
                usable &= ~crowd
            if not usable.any():
                continue
            best = np.where(usable, overlaps[d], -1.0)
            taken = len(best) - 1 - int(best[::-1].argmax())  # the last one among equal overlaps
            free[taken] = False
            right[row, d], ignored[row, d] = not crowd[taken], crowd[taken]
    return Matches(scores, right, ignored, int((~crowd).sum()))


def mean_average_precisions(images: Sequence[Mapping[int, Matches]], chosen: Flags) -> Floats:
    """Return the mAP50-95 of each selection of images, [choices]. It is NaN if the selected images have no object.

    Args:
        images: for each image, matches by category. Among equal scores, those of the earlier image come first.
        chosen: whether each selection contains each image, [choices, images].
    """
    total, counted = np.zeros(len(chosen)), np.zeros(len(chosen))
    for category in sorted({c for image in images for c in image}):
        found = [(i, image[category]) for i, image in enumerate(images) if category in image]
        places = np.array([i for i, _ in found])
        objects = chosen[:, places].astype(np.int64) @ np.array([m.objects for _, m in found])
        if objects.any():
            total += np.where(objects > 0, _average_precision([m for _, m in found], chosen[:, places], objects), 0.0)
            counted += objects > 0
    precision: Floats = np.divide(total, counted, out=np.full(len(chosen), np.nan), where=counted > 0)
    return precision


def _average_precision(found: Sequence[Matches], chosen: Flags, objects: NDArray[np.int64]) -> Floats:
    """Return the average precision of one category for each selection, [choices]. It is the mean over the
    thresholds.
    """
    order = np.argsort(-np.concatenate([m.scores for m in found]), kind="stable")
    place = np.repeat(np.arange(len(found)), [len(m.scores) for m in found])[order]
    right = np.concatenate([m.right for m in found], axis=1)[:, order]
    ignored = np.concatenate([m.ignored for m in found], axis=1)[:, order]
    there = chosen[:, place]
    every = np.cumsum(there, axis=1)
    needed = np.stack([_needed(int(n)) for n in objects])
    total = np.zeros(len(chosen))
    for took, dropped in zip(right, ignored, strict=True):
        at = np.flatnonzero(took)
        if not at.size:
            continue
        seen = np.cumsum(there & ~dropped, axis=1) if dropped.any() else every
        here = there[:, at]
        count = np.cumsum(here, axis=1)
        precision = np.where(here, count / (seen[:, at] + np.spacing(1)), 0.0)
        best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        # The best precision for each number of objects found so far; 0 for numbers that are never reached.
        by_count = np.zeros((len(chosen), max(int(objects.max()), at.size) + 1))
        rows, columns = np.nonzero(here)
        by_count[rows, count[rows, columns]] = best[rows, columns]
        total += np.take_along_axis(by_count, needed, axis=1).mean(axis=1)
    return total / len(THRESHOLDS)


@cache
def _needed(objects: int) -> NDArray[np.int64]:
    """Return, for each of the 101 recalls, how many of `objects` must be found. The number is at least one."""
    if not objects:
        return np.ones(len(_RECALLS), np.int64)
    return np.maximum(np.searchsorted(np.arange(objects + 1) / objects, _RECALLS), 1)


def _overlaps(boxes: Floats, objects: Floats, crowd: Flags) -> Floats:
    """Return the intersection over union of each detection with each object, [D, G]. For an object marked as crowd, the
    detection's own area replaces the union.
    """
    low = np.maximum(boxes[:, None, :2], objects[None, :, :2])
    high = np.minimum(boxes[:, None, :2] + boxes[:, None, 2:], objects[None, :, :2] + objects[None, :, 2:])
    size = high - low
    common = np.where((size > 0).all(axis=2), size.prod(axis=2), 0.0)
    own, others = boxes[:, 2] * boxes[:, 3], objects[:, 2] * objects[:, 3]
    union = np.where(crowd[None], own[:, None], own[:, None] + others[None] - common)
    shared: NDArray[Any] = np.divide(common, union, out=np.zeros_like(common), where=union != 0)
    return shared


MAX_FILE_BYTES = 512 << 20

# (class for the annotations, class for the evaluation), in order of preference.
PACKAGES = (
    ("faster_coco_eval:COCO", "faster_coco_eval:COCOeval_faster"),
    ("pycocotools.coco:COCO", "pycocotools.cocoeval:COCOeval"),
)

# Metric → its index in COCO's twelve summary figures.
SUMMARY = MappingProxyType({"mAP50-95": 0, "mAP50": 1, "mAP75": 2, "AR100": 8})


@dataclass(frozen=True)
class Image:
    """Hold one annotated image: its COCO id, its size in pixels (None if the file omits it), and its annotations as
    they are in the file.
    """

    id: int
    size: tuple[int, int] | None
    annotations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class CocoAnnotations:
    """Hold an annotation file: images by `file_name`, and category ids in ascending order. Class index i is the i-th
    id.
    """

    source: str
    images: Mapping[str, Image]
    categories: tuple[int, ...]
    names: Mapping[int, str] = field(default_factory=dict)

    def image(self, path: str) -> Image:
        """Return the annotated image that is listed under the file's path below the data folder, or else under the
        file's name.

        Raises:
            DataError: no image fits, or several do.
        """
        name = PurePath(path).name
        listed = [path] if path in self.images else self._files_by_name.get(name, [])
        if len(listed) != 1:
            many = f" but {', '.join(map(repr, listed[:2]))}" if listed else ""
            raise DataError(
                f"{self.source} lists no image {name!r}{many}",
                "Give the parent folder, so that their paths differ" if listed else _ONE_SET,
            )
        return self.images[listed[0]]

    @functools.cached_property
    def _files_by_name(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for file in self.images:
            found.setdefault(PurePath(file).name, []).append(file)
        return found


_ONE_SET = "Use images and annotations of the same data set"


def load_annotations(path: Path) -> CocoAnnotations:
    """Read a COCO instances file: {"images": [...], "annotations": [...], "categories": [...]}.

    Raises:
        DataError: the file is missing, is larger than MAX_FILE_BYTES, is not JSON, or lacks one of these lists or an
            id.
    """
    fix = "Give a COCO instances JSON file as --annotations"
    try:
        if is_longer(path, MAX_FILE_BYTES):
            raise DataError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB", fix)
        plain = json.loads(read_file(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", fix) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", fix) from error
    try:
        return _annotations(path, plain)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{path} is not a COCO instances file: {type(error).__name__} {error}", fix) from error


def _annotations(path: Path, plain: Any) -> CocoAnnotations:
    objects: dict[int, list[Mapping[str, Any]]] = {}
    categories = {_identity(category["id"]): str(category.get("name", "")) for category in plain["categories"]}
    for annotation in plain["annotations"]:
        image, category = _identity(annotation["image_id"]), _identity(annotation["category_id"])
        x, y, width, height = (float(number) for number in annotation["bbox"])
        if category not in categories:
            raise ValueError(f"annotation of unknown category {category}")
        if not all(map(math.isfinite, (x, y, width, height))) or min(width, height) < 0:
            raise ValueError(f"annotation of image {image} with a box of {annotation['bbox']}")
        objects.setdefault(image, []).append(
            {
                "image_id": image,
                "category_id": category,
                "bbox": [x, y, width, height],
                "area": float(annotation.get("area", width * height)),
                "iscrowd": int(annotation.get("iscrowd", 0)),
            }
        )
    images: dict[str, Image] = {}
    files: dict[int, str] = {}
    for image in plain["images"]:
        size = (int(image["width"]), int(image["height"])) if "width" in image and "height" in image else None
        # Tools on Windows write backslashes.
        identity, file = _identity(image["id"]), str(image["file_name"]).replace("\\", "/")
        if files.setdefault(identity, file) != file or (file in images and images[file].id != identity):
            raise ValueError(f"image {file!r} shares its id {identity}, or its name, with another")
        images[file] = Image(identity, size, tuple(objects.get(identity, ())))
    return CocoAnnotations(str(path), MappingProxyType(images), tuple(sorted(categories)), MappingProxyType(categories))


def _identity(value: Any) -> int:
    """Return an id as a number. In the file it may be a text.

    Raises:
        ValueError, TypeError: the id is not a whole number.
    """
    number = int(value)
    if isinstance(value, float) and value != number:
        raise ValueError(f"id {value}")
    return number


def load_package(packages: Iterable[tuple[str, str]] = PACKAGES) -> tuple[Any, Any]:
    """Return the classes (annotations, evaluation) of the first COCO package that is installed.

    Raises:
        RuntimeUnavailableError: no COCO package is installed.
    """
    for truth, evaluation in packages:
        try:
            return pkgutil.resolve_name(truth), pkgutil.resolve_name(evaluation)
        except ImportError:
            continue
    raise RuntimeUnavailableError(
        "neither faster-coco-eval nor pycocotools is installed", "Install one: pip install 'edgeq[coco]'"
    )


def mean_average_precision(
    annotations: CocoAnnotations, found: Sequence[tuple[Image, Detections]], package: tuple[Any, Any]
) -> dict[str, float]:
    """Return COCO's box metrics over only the images in `found`. Boxes are in pixels of the annotated image.

    mAP50-95 is the mean over categories and the IoU thresholds .50:.05:.95. mAP50 and mAP75 use one threshold. AR100 is
    the mean recall at 100 detections per image.

    Args:
        package: the result of `load_package`.

    Raises:
        DataError: none of the images has an annotated object.
    """
    return score_guesses(annotations, [image for image, _ in found], guesses(annotations, found), package)


def score_guesses(
    annotations: CocoAnnotations, images: Sequence[Image], given: Sequence[Mapping[str, Any]], package: tuple[Any, Any]
) -> dict[str, float]:
    """Return the metrics of `mean_average_precision` for results in COCO's form: a list of {image_id, category_id,
    bbox, score}.

    Raises:
        DataError: none of the images has an annotated object, or a result has another form.
    """
    truth = [annotation for image in images for annotation in image.annotations]
    if all(annotation["iscrowd"] for annotation in truth):
        raise DataError(f"{annotations.source}: no object is annotated in the images seen", "Raise --count")
    if not given:
        return dict.fromkeys(SUMMARY, 0.0)
    known = {image.id for image in images}
    for result in given:
        if not isinstance(result, Mapping) or not {"image_id", "category_id", "bbox", "score"} <= result.keys():
            raise DataError(f"{result!r} is not a detection", "Give {image_id, category_id, bbox, score}")
        if result["image_id"] not in known:
            raise DataError(f"{annotations.source} has no image {result['image_id']}", "Give the images' annotations")
    dataset = {
        "info": {},
        "images": [
            {"id": image.id, "width": (image.size or (0, 0))[0], "height": (image.size or (0, 0))[1]}
            for image in images
        ],
        "annotations": [{"id": number, **annotation} for number, annotation in enumerate(truth, start=1)],
        "categories": [{"id": c, "name": annotations.names.get(c, str(c))} for c in annotations.categories],
    }
    coco_class, evaluation_class = package
    with contextlib.redirect_stdout(io.StringIO()):  # Both packages print their progress, which is suppressed here.
        reference = coco_class()
        reference.dataset = dataset
        reference.createIndex()
        # The packages modify the results that they receive.
        evaluation = evaluation_class(reference, reference.loadRes([dict(result) for result in given]), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: float(evaluation.stats[place]) for name, place in SUMMARY.items()}


def guesses(annotations: CocoAnnotations, found: Sequence[tuple[Image, Detections]]) -> list[dict[str, Any]]:
    """Return results in COCO's form: a list of {image_id, category_id, bbox (left, top, width, height), score}."""
    return [
        {
            "image_id": image.id,
            "category_id": annotations.categories[index],
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "score": score,
        }
        for image, d in found
        for (x1, y1, x2, y2), score, index in zip(d.boxes.tolist(), d.scores.tolist(), d.classes.tolist(), strict=True)
    ]


def match_image(annotations: CocoAnnotations, image: Image, detections: Detections) -> dict[int, Matches]:
    """Match the detections of one image with its objects, and return the matches by category id.

    Boxes are in pixels of the annotated image.
    """
    boxes = np.concatenate([detections.boxes[:, :2], detections.boxes[:, 2:] - detections.boxes[:, :2]], axis=1)
    categories = np.array(annotations.categories, np.int64)[detections.classes]
    known = np.array([o["category_id"] for o in image.annotations], np.int64)
    objects = np.array([o["bbox"] for o in image.annotations], np.float64).reshape(-1, 4)
    crowd = np.array([o["iscrowd"] for o in image.annotations], np.bool_)
    return {
        int(c): match(
            boxes[categories == c], detections.scores[categories == c], objects[known == c], crowd[known == c]
        )
        for c in np.union1d(categories, known)
    }
