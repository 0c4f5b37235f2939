"""Measure objects with masks, keypoints or rotated boxes by COCO's mean average precision.

The figures for masks and keypoints come from faster-coco-eval or pycocotools. The module's own matching gives those for
rotated boxes, which the packages do not know, and the spread of all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from edgeq_device.answers.answer import Answer
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.errors import DataError, UsageError
from edgeq.measure.answer_metric import AnswerMetric
from edgeq.measure.average_precision import Matches, match_overlaps, mean_average_precisions
from edgeq.measure.coco import CocoAnnotations, Image, load_annotations, load_package, score_results
from edgeq.measure.keypoint_similarity import find_sigmas
from edgeq.measure.polygons import compute_polygon_overlaps, find_corners
from edgeq.measure.task import TaskOptions

Floats = NDArray[np.float64]
# A keypoint of COCO's packages without an area divides by this.
_TINY = np.spacing(1)


@dataclass(frozen=True)
class ImageResults:
    """Hold one image with its objects and detections.

    Attributes:
        image: the image, with only the annotations that count.
        results: detections in COCO's form.
        matches: category → matches with the objects.
    """

    image: Image
    results: tuple[Mapping[str, Any], ...]
    matches: Mapping[int, Matches]


Compare = Callable[[Answer, NDArray[np.int64], Sequence[Mapping[str, Any]]], tuple[Floats, list[dict[str, Any]]]]
"""Function from an answer, the indices of its objects of one category, and the annotations of that category to their
overlaps [D, G] and the detections in COCO's form.
"""


def make_metric(name: str, answers: frozenset[str], compare: Compare, limit: int, options: TaskOptions) -> AnswerMetric:
    """Return a task that measures objects against annotations.

    Raises:
        UsageError: the options have no annotations.
    """
    if options.annotations is None:
        raise UsageError(f"{name} needs annotations", "Give a COCO file, or a folder of YOLO or VOC labels")
    annotations = load_annotations(options.annotations, details=True)
    thresholds: dict[str, float] = {"confidence": 0.01, "limit": limit}
    thresholds.update({key: value for key in ("confidence", "iou") if (value := getattr(options, key)) is not None})
    return AnswerMetric(
        name,
        "mAP50-95",
        functools.partial(read_image, annotations, compare),
        summarize,
        answers,
        thresholds=thresholds,
        finish=functools.partial(finish, annotations, compare),
    )


def read_image(annotations: CocoAnnotations, compare: Compare, answer: Answer, sample: Sample) -> ImageResults:
    """Match the objects of an answer with the annotated ones of its image.

    Raises:
        DataError: the image is not annotated, has another size, or an annotation lacks a mask or keypoints.
    """
    context = sample.context
    image = annotations.image(str(context.get("path", context.get("file", sample.name))))
    if image.size is not None and answer.image_size is not None and image.size != tuple(answer.image_size):
        raise DataError(
            f"{sample.name} is {answer.image_size[0]}x{answer.image_size[1]}, but annotated as "
            f"{image.size[0]}x{image.size[1]}",
            "Use images and annotations of the same data set",
        )
    categories = _find_categories(annotations, answer)
    detected = np.array([categories.get(int(number), -1) for number in answer.classes], np.int64)
    results: list[Mapping[str, Any]] = []
    matches: dict[int, Matches] = {}
    for category in annotations.categories:
        places = np.flatnonzero(detected == category)
        objects = [entry for entry in image.annotations if entry["category_id"] == category]
        if not len(places) and not objects:
            continue
        overlaps, entries = compare(answer, places, objects)
        ignored = np.array([bool(entry["iscrowd"]) or entry.get("num_keypoints", 1) == 0 for entry in objects], bool)
        areas = np.array([entry["area"] for entry in entries], np.float64)
        matches[category] = match_overlaps(overlaps, answer.scores[places], areas, ignored)
        results += [
            {"image_id": image.id, "category_id": category, "score": float(answer.scores[place]), **entry}
            for place, entry in zip(places, entries, strict=True)
        ]
    return ImageResults(image, tuple(results), matches)


def _find_categories(annotations: CocoAnnotations, answer: Answer) -> Mapping[int, int]:
    """Return class number → category id: by their names if the model has all of them, else in the order of the ids."""
    numbers = {name: number for number, name in enumerate(answer.labels)}
    if annotations.names and all(name in numbers for name in annotations.names.values()):
        return {numbers[name]: category for category, name in annotations.names.items()}
    return dict(enumerate(annotations.categories))


def summarize(values: Sequence[ImageResults]) -> Mapping[str, float]:
    """Return "mAP50-95" and "mAP50" by the module's own matching.

    Raises:
        DataError: no object is annotated.
    """
    images = [value.matches for value in sorted(values, key=lambda value: value.image.id)]
    strict = [
        {c: dataclasses.replace(m, right=m.right[:1], ignored=m.ignored[:1]) for c, m in image.items()}
        for image in images
    ]
    everything = np.ones((1, len(images)), bool)
    figures = [float(mean_average_precisions(rows, everything)[0]) for rows in (images, strict)]
    if not all(map(math.isfinite, figures)):
        raise DataError("no object is annotated in the images seen", "Raise ⟨count⟩")
    return {"mAP50-95": figures[0], "mAP50": figures[1]}


def finish(annotations: CocoAnnotations, compare: Compare, values: Sequence[ImageResults]) -> Mapping[str, float]:
    """Return the figures of a COCO package; those of `summarize` for rotated boxes."""
    if compare is compare_rotated:
        return summarize(values)
    keypoints = compare is compare_points
    results = [result for value in values for result in value.results]
    sigmas = None
    if keypoints and results:
        sigmas = find_sigmas(len(results[0]["keypoints"]) // 3).tolist()
    images = [_with_masks(value.image) if not keypoints else value.image for value in values]
    return score_results(annotations, images, results, load_package(), "keypoints" if keypoints else "segm", sigmas)


def _with_masks(image: Image) -> Image:
    entries = tuple({**e, "segmentation": to_runs(e, image.size or (0, 0))} for e in image.annotations)
    return dataclasses.replace(image, annotations=entries)


def compare_rotated(
    answer: Answer, places: NDArray[np.int64], objects: Sequence[Mapping[str, Any]]
) -> tuple[Floats, list[dict[str, Any]]]:
    """Compare rotated boxes by the IoU of their corners."""
    angles = answer.angles if answer.angles is not None else np.zeros(len(answer))
    corners = find_corners(answer.boxes[places], angles[places])
    columns = [compute_polygon_overlaps(corners, _read_corners(entry)[None]) for entry in objects]
    overlaps = np.concatenate(columns, axis=1) if columns else np.zeros((len(places), 0))
    sides = answer.boxes[places, 2:] - answer.boxes[places, :2]
    return overlaps, [{"area": float(area)} for area in sides.prod(axis=1)]


def _read_corners(entry: Mapping[str, Any]) -> Floats:
    """Return the corners [P, 2] of an annotation: of its polygon, or else of its box."""
    polygons = entry.get("segmentation")
    if isinstance(polygons, list) and polygons:
        return _read_polygon(polygons[0])
    x, y, w, h = entry["bbox"]
    return np.array([[x, y], [x + w, y], [x + w, y + h], [x, y + h]], np.float64)


def _read_polygon(numbers: Any) -> Floats:
    try:
        points = np.asarray(numbers, np.float64).reshape(-1, 2)
    except (ValueError, TypeError):
        points = np.full((1, 2), np.nan)
    if len(points) < 3 or not np.isfinite(points).all():
        raise DataError("a segmentation is not a list of polygons of x and y", "Correct the annotations")
    return points


def compare_points(
    answer: Answer, places: NDArray[np.int64], objects: Sequence[Mapping[str, Any]]
) -> tuple[Floats, list[dict[str, Any]]]:
    """Compare keypoints by their OKS, as COCO's packages do."""
    points = answer.keypoints if answer.keypoints is not None else np.zeros((len(answer), 0, 3))
    overlaps = np.zeros((len(places), len(objects)))
    for column, entry in enumerate(objects):
        try:
            truth = np.asarray(entry.get("keypoints"), np.float64).reshape(-1, 3)
        except (ValueError, TypeError):
            truth = np.zeros((0, 3))
        if len(truth) != points.shape[1] or not np.isfinite(truth).all():
            raise DataError(
                f"an object has {len(truth)} keypoints, but the model gives {points.shape[1]}",
                "Use annotations with the model's keypoints",
            )
        overlaps[:, column] = _compute_oks(points[places], truth, entry)
    entries = []
    for place in places:
        low, high = points[place, :, :2].min(axis=0), points[place, :, :2].max(axis=0)
        entries.append({"keypoints": points[place].reshape(-1).tolist(), "area": float((high - low).prod())})
    return overlaps, entries


def _compute_oks(points: Floats, truth: Floats, entry: Mapping[str, Any]) -> Floats:
    variances = (2 * find_sigmas(len(truth))) ** 2
    visible = truth[:, 2] > 0
    if visible.any():
        squared = ((points[..., :2] - truth[:, :2]) ** 2).sum(axis=2)[:, visible]
        exponents = squared / variances[visible] / (entry["area"] + _TINY) / 2
    else:
        # Without labelled points, the packages measure how far points lie outside of twice the box.
        x, y, w, h = entry["bbox"]
        low, high = np.array([x - w, y - h]), np.array([x + 2 * w, y + 2 * h])
        beyond = np.maximum(0, low - points[..., :2]) + np.maximum(0, points[..., :2] - high)
        exponents = (beyond**2).sum(axis=2) / variances / (entry["area"] + _TINY) / 2
    oks: Floats = np.exp(-exponents).mean(axis=1)
    return oks


def compare_masks(
    answer: Answer, places: NDArray[np.int64], objects: Sequence[Mapping[str, Any]]
) -> tuple[Floats, list[dict[str, Any]]]:
    """Compare masks by their IoU."""
    if answer.masks is None or answer.image_size is None:
        raise DataError("the model's answers have no masks", "Choose another ⟨task⟩")
    tools = load_mask_tools()
    runs = [tools.encode(np.asfortranarray(answer.masks[place].astype(np.uint8))) for place in places]
    truth = [to_runs(entry, answer.image_size) for entry in objects]
    overlaps = np.zeros((len(places), len(objects)))
    if overlaps.size:
        overlaps = np.asarray(tools.iou(runs, truth, [entry["iscrowd"] for entry in objects]), np.float64)
    return overlaps, [{"segmentation": run, "area": float(tools.area(run))} for run in runs]


def load_mask_tools() -> Any:
    """Return the functions for masks of the COCO package that is installed."""
    module = load_package()[0].__module__.partition(".")[0]
    return pkgutil.resolve_name("faster_coco_eval.core.mask" if module == "faster_coco_eval" else "pycocotools.mask")


def to_runs(entry: Mapping[str, Any], size: tuple[int, int]) -> Any:
    """Return an annotation's mask in the packages' compressed form. Its segmentation is polygons, or runs of pixels.

    Raises:
        DataError: the segmentation is missing, or does not fit the image's `size` (width, height).
    """
    segmentation, tools = entry.get("segmentation"), load_mask_tools()
    width, height = size
    if isinstance(segmentation, list) and segmentation:
        reach = np.array([width, height], np.float64)
        # The rasterizer takes memory for the length of an outline, so nothing lies far outside of the image.
        outlines = [np.clip(_read_polygon(points), -reach, 2 * reach).reshape(-1).tolist() for points in segmentation]
        return tools.merge(tools.frPyObjects(outlines, height, width))
    if isinstance(segmentation, Mapping) and list(segmentation.get("size", ())) == [height, width]:
        counts = segmentation.get("counts")
        counts = _parse_counts(counts) if isinstance(counts, str) else counts
        # The packages trust the counts. Wrong ones would write outside of the mask.
        if (
            isinstance(counts, list)
            and all(type(n) is int and n >= 0 for n in counts)
            and sum(counts) == height * width
        ):
            return tools.frPyObjects({"size": [height, width], "counts": counts}, height, width)
    raise DataError("an annotation has no segmentation that fits its image", "Give polygons, or runs of pixels")


def _parse_counts(text: str) -> list[int]:
    """Return the lengths of the runs in COCO's compressed text: numbers of 5 bits a character, of which those from the
    third on are differences to the number two places before. Return [] for damaged text.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 30:
            return []
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            value -= (1 << shift) if bits & 0x10 else 0
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    return counts
