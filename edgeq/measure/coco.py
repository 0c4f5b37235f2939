"""COCO annotations and COCO's mean average precision, by faster-coco-eval or pycocotools, whichever is installed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import numpy as np

from edgeq.errors import DataError, RuntimeUnavailableError
from edgeq.measure.average_precision import Matches, match
from edgeq.measure.boxes import Detections
from edgeq.records import is_longer

MAX_FILE_BYTES = 512 << 20

# Module, class of the annotations, class of the evaluation, in order of preference.
PACKAGES = (
    ("faster_coco_eval", "COCO", "COCOeval_faster"),
    ("pycocotools", "coco.COCO", "cocoeval.COCOeval"),
)

# Metric → its place in COCO's twelve summary figures.
SUMMARY = MappingProxyType({"mAP50-95": 0, "mAP50": 1, "mAP75": 2, "AR100": 8})


@dataclass(frozen=True)
class Image:
    """One annotated image: COCO id, size in pixels where the file gives it, annotations as in the file."""

    id: int
    size: tuple[int, int] | None
    annotations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class CocoAnnotations:
    """An annotation file: images by `file_name`, category ids in ascending order (class index i is the i-th)."""

    source: str
    images: Mapping[str, Image]
    categories: tuple[int, ...]
    names: Mapping[int, str] = field(default_factory=dict)

    def image(self, path: str) -> Image:
        """The image of a file: the one listed with its path below the data folder, or else with its name.

        Raises:
            DataError: none is, or several are.
        """
        name = PurePath(path).name
        listed = [path] if path in self.images else self._files_by_name.get(name, [])
        if len(listed) != 1:
            many = f" but {', '.join(map(repr, listed[:2]))}" if listed else ""
            raise DataError(
                f"{self.source} lists no image {name!r}{many}",
                "Give the folder above, so that paths tell them apart" if listed else _ONE_SET,
            )
        return self.images[listed[0]]

    @functools.cached_property
    def _files_by_name(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for file in self.images:
            found.setdefault(PurePath(file).name, []).append(file)
        return found


_ONE_SET = "Take images and annotations of one set"


def load_annotations(path: Path) -> CocoAnnotations:
    """Read a COCO instances file: {"images": [...], "annotations": [...], "categories": [...]}.

    Raises:
        DataError: missing, larger than MAX_FILE_BYTES, not JSON, or without one of these lists or their ids.
    """
    fix = "Give a COCO instances JSON file as --annotations"
    try:
        if is_longer(path, MAX_FILE_BYTES):
            raise DataError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB", fix)
        plain = json.loads(path.read_bytes())
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
    """An id, which may be written as text.

    Raises:
        ValueError, TypeError: it is no whole number.
    """
    number = int(value)
    if isinstance(value, float) and value != number:
        raise ValueError(f"id {value}")
    return number


def load_package(packages: Iterable[tuple[str, str, str]] = PACKAGES) -> tuple[Any, Any]:
    """The classes (annotations, evaluation) of the first COCO package that is installed.

    Raises:
        RuntimeUnavailableError: none is.
    """
    for package, truth, evaluation in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            continue
        return _resolve(package, truth), _resolve(package, evaluation)
    raise RuntimeUnavailableError(
        "neither faster-coco-eval nor pycocotools is installed", "Install one: pip install 'edgeq[coco]'"
    )


def _resolve(package: str, name: str) -> Any:
    module, _, attribute = f"{package}.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def mean_average_precision(
    annotations: CocoAnnotations, found: Sequence[tuple[Image, Detections]], package: tuple[Any, Any]
) -> dict[str, float]:
    """COCO's box metrics over the images in `found` alone; boxes in pixels of the annotated image.

    mAP50-95: mean over categories and IoU thresholds .50:.05:.95; mAP50, mAP75 at one threshold; AR100: mean recall at
    100 detections an image. `package` is what `load_package` gives.

    Raises:
        DataError: none of the images has an annotated object.
    """
    return score_guesses(annotations, [image for image, _ in found], guesses(annotations, found), package)


def score_guesses(
    annotations: CocoAnnotations, images: Sequence[Image], given: Sequence[Mapping[str, Any]], package: tuple[Any, Any]
) -> dict[str, float]:
    """The metrics of `mean_average_precision`, of COCO's list of results {image_id, category_id, bbox, score}.

    Raises:
        DataError: none of the images has an annotated object, or a result is not of that form.
    """
    truth = [annotation for image in images for annotation in image.annotations]
    if all(annotation["iscrowd"] for annotation in truth):
        raise DataError(f"{annotations.source}: no object is annotated in the images seen", "Raise --count")
    if not given:
        return dict.fromkeys(SUMMARY, 0.0)
    known = {image.id for image in images}
    for result in given:
        if not isinstance(result, Mapping) or not {"image_id", "category_id", "bbox", "score"} <= result.keys():
            raise DataError(f"{result!r} is no detection", "Give {image_id, category_id, bbox, score}")
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
    with contextlib.redirect_stdout(io.StringIO()):  # both packages print their progress
        reference = coco_class()
        reference.dataset = dataset
        reference.createIndex()
        # They write into what they are given.
        evaluation = evaluation_class(reference, reference.loadRes([dict(result) for result in given]), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: float(evaluation.stats[place]) for name, place in SUMMARY.items()}


def guesses(annotations: CocoAnnotations, found: Sequence[tuple[Image, Detections]]) -> list[dict[str, Any]]:
    """COCO's list of results: {image_id, category_id, bbox (left, top, width, height), score}."""
    return [guess for image, detections in found for guess in _guesses(annotations, image, detections)]


def _guesses(annotations: CocoAnnotations, image: Image, detections: Detections) -> Iterable[dict[str, Any]]:
    for box, score, index in zip(detections.boxes, detections.scores, detections.classes, strict=True):
        x1, y1, x2, y2 = (float(number) for number in box)
        yield {
            "image_id": image.id,
            "category_id": annotations.categories[int(index)],
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "score": float(score),
        }


def match_image(annotations: CocoAnnotations, image: Image, detections: Detections) -> dict[int, Matches]:
    """Detections of one image matched with its objects, by category id; boxes in pixels of the annotated image."""
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
