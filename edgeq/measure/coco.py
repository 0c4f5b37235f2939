"""Read COCO annotations, and compute COCO's metrics with faster-coco-eval or pycocotools, whichever is installed.

The boxes in COCO's files are x, y, width, height in pixels.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from edgeq_device.system.files import read_file

from edgeq.data.object_labels import load_object_labels
from edgeq.errors import DataError, RuntimeUnavailableError
from edgeq.measure.average_precision import Matches, match
from edgeq.measure.boxes import Detections
from edgeq.util.record_files import is_longer

# COCO's own training annotations have 448 MB. A larger file would fill the memory when it is parsed.
MAX_FILE_BYTES = 512 << 20
# (class for the annotations, class for the evaluation), in order of preference.
PACKAGES = (
    ("faster_coco_eval:COCO", "faster_coco_eval:COCOeval_faster"),
    ("pycocotools.coco:COCO", "pycocotools.cocoeval:COCOeval"),
)
# Metric → its index in COCO's twelve summary figures.
SUMMARY = MappingProxyType({"mAP50-95": 0, "mAP50": 1, "mAP75": 2, "AR100": 8})
# COCO summarizes keypoints by ten figures.
KEYPOINT_SUMMARY = MappingProxyType({"mAP50-95": 0, "mAP50": 1, "mAP75": 2, "AR20": 5})


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

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers receive the annotations, but read-only mappings cannot be pickled.
        return CocoAnnotations, (self.source, dict(self.images), self.categories, dict(self.names))

    def image(self, path: str) -> Image:
        """Return the annotated image that is listed under the file's path below the data folder, or else under the
        file's name.

        Raises:
            DataError: no image fits, or several do.
        """
        name = PurePath(path).name
        # Two folders may contain files of the same name, so the path decides first.
        listed = [path] if path in self.images else self._files_by_name.get(name, [])
        if len(listed) != 1:
            ambiguity = f" but {', '.join(map(repr, listed[:2]))}" if listed else ""
            raise DataError(
                f"{self.source} lists no image {name!r}{ambiguity}",
                "Give the parent folder, so that their paths differ" if listed else _ONE_SET,
            )
        return self.images[listed[0]]

    @functools.cached_property
    def _files_by_name(self) -> Mapping[str, list[str]]:
        files_by_name: dict[str, list[str]] = {}
        for file in self.images:
            files_by_name.setdefault(PurePath(file).name, []).append(file)
        return files_by_name


# Keys of annotations that metrics of masks and keypoints read.
_DETAILS = ("segmentation", "keypoints", "num_keypoints")
_ONE_SET = "Use images and annotations of the same data set"


def load_annotations(path: Path, details: bool = False) -> CocoAnnotations:
    """Read a COCO instances file: {"images": [...], "annotations": [...], "categories": [...]}. A folder contains
    labels in YOLO's or Pascal VOC's form instead: see `edgeq.data.object_labels`.

    Args:
        details: whether to keep segmentations and keypoints, which take many times the memory of boxes.

    Raises:
        DataError: the file is missing, is larger than MAX_FILE_BYTES, is not JSON, or lacks one of these lists or an
            id.
    """
    fix = "Give a COCO instances JSON file as ⟨annotations⟩"
    if path.is_dir():
        return _parse_annotations(path, load_object_labels(path), details)
    try:
        if is_longer(path, MAX_FILE_BYTES):
            raise DataError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB", fix)
        content = json.loads(read_file(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", fix) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", fix) from error
    try:
        return _parse_annotations(path, content, details)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{path} is not a COCO instances file: {type(error).__name__} {error}", fix) from error


def _parse_annotations(path: Path, content: Any, details: bool) -> CocoAnnotations:
    objects: dict[int, list[Mapping[str, Any]]] = {}
    categories = {_parse_id(category["id"]): str(category.get("name", "")) for category in content["categories"]}
    for annotation in content["annotations"]:
        image, category = _parse_id(annotation["image_id"]), _parse_id(annotation["category_id"])
        x, y, width, height = (float(number) for number in annotation["bbox"])
        if category not in categories:
            raise ValueError(f"annotation of unknown category {category}")
        if not all(map(math.isfinite, (x, y, width, height))) or min(width, height) < 0:
            raise ValueError(f"annotation of image {image} with a box of {annotation['bbox']}")
        # Only the keys that the packages read are kept. Segmentations would take many times the memory.
        objects.setdefault(image, []).append(
            {
                "image_id": image,
                "category_id": category,
                "bbox": [x, y, width, height],
                "area": float(annotation.get("area", width * height)),
                "iscrowd": int(annotation.get("iscrowd", 0)),
                **({key: annotation[key] for key in _DETAILS if key in annotation} if details else {}),
            }
        )
    images: dict[str, Image] = {}
    files: dict[int, str] = {}
    for image in content["images"]:
        size = (int(image["width"]), int(image["height"])) if "width" in image and "height" in image else None
        # Tools on Windows write backslashes.
        identity, file = _parse_id(image["id"]), str(image["file_name"]).replace("\\", "/")
        if files.setdefault(identity, file) != file or (file in images and images[file].id != identity):
            raise ValueError(f"image {file!r} shares its id {identity}, or its name, with another")
        images[file] = Image(identity, size, tuple(objects.get(identity, ())))
    return CocoAnnotations(str(path), MappingProxyType(images), tuple(sorted(categories)), MappingProxyType(categories))


def _parse_id(value: Any) -> int:
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
        "neither faster-coco-eval nor pycocotools is installed", "Install one: pip install faster-coco-eval"
    )


def mean_average_precision(
    annotations: CocoAnnotations, detections: Sequence[tuple[Image, Detections]], package: tuple[Any, Any]
) -> dict[str, float]:
    """Return COCO's box metrics over only the images in `detections`. Boxes are in pixels of the annotated image.

    mAP50-95 is the mean over categories and the IoU thresholds .50:.05:.95. mAP50 and mAP75 use one threshold. AR100 is
    the mean recall at 100 detections per image.

    Args:
        package: the result of `load_package`.

    Raises:
        DataError: none of the images has an annotated object.
    """
    return score_results(
        annotations, [image for image, _ in detections], list_results(annotations, detections), package
    )


def score_results(
    annotations: CocoAnnotations,
    images: Sequence[Image],
    results: Sequence[Mapping[str, Any]],
    package: tuple[Any, Any],
    kind: Literal["bbox", "segm", "keypoints"] = "bbox",
    sigmas: Sequence[float] | None = None,
) -> dict[str, float]:
    """Return the metrics of `mean_average_precision` for results in COCO's form: a list of {image_id, category_id,
    bbox, score}, with segmentation or keypoints for the other kinds.

    Args:
        sigmas: sigma of each keypoint; None for COCO's.

    Raises:
        DataError: none of the images has an annotated object, or a result has another form.
    """
    summary = KEYPOINT_SUMMARY if kind == "keypoints" else SUMMARY
    key = {"bbox": "bbox", "segm": "segmentation", "keypoints": "keypoints"}[kind]
    truth = [annotation for image in images for annotation in image.annotations]
    if all(annotation["iscrowd"] for annotation in truth):
        raise DataError(f"{annotations.source}: no object is annotated in the images seen", "Raise ⟨count⟩")
    if not results:
        # pycocotools fails on an empty list of results.
        return dict.fromkeys(summary, 0.0)
    image_ids = {image.id for image in images}
    for result in results:
        if not isinstance(result, Mapping) or not {"image_id", "category_id", key, "score"} <= result.keys():
            raise DataError(f"{result!r} is not a detection", f"Give {{image_id, category_id, {key}, score}}")
        if result["image_id"] not in image_ids:
            raise DataError(f"{annotations.source} has no image {result['image_id']}", "Give the images' annotations")
    # The data set contains only images that were run, because the objects of all others would count as missed.
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
        evaluation = evaluation_class(reference, reference.loadRes([dict(result) for result in results]), kind)
        if sigmas is not None:
            evaluation.params.kpt_oks_sigmas = np.array(sigmas)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: float(evaluation.stats[place]) for name, place in summary.items()}


def list_results(annotations: CocoAnnotations, detections: Sequence[tuple[Image, Detections]]) -> list[dict[str, Any]]:
    """Return results in COCO's form: a list of {image_id, category_id, bbox (left, top, width, height), score}."""
    return [
        {
            "image_id": image.id,
            "category_id": annotations.categories[index],
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "score": score,
        }
        for image, d in detections
        for (x1, y1, x2, y2), score, index in zip(d.boxes.tolist(), d.scores.tolist(), d.classes.tolist(), strict=True)
    ]


def match_image(annotations: CocoAnnotations, image: Image, detections: Detections) -> dict[int, Matches]:
    """Match the detections of one image with its objects, and return the matches by category id.

    Boxes are in pixels of the annotated image.
    """
    boxes = np.concatenate([detections.boxes[:, :2], detections.boxes[:, 2:] - detections.boxes[:, :2]], axis=1)
    categories = np.array(annotations.categories, np.int64)[detections.classes]
    object_categories = np.array([o["category_id"] for o in image.annotations], np.int64)
    objects = np.array([o["bbox"] for o in image.annotations], np.float64).reshape(-1, 4)
    crowd = np.array([o["iscrowd"] for o in image.annotations], np.bool_)
    return {
        int(c): match(
            boxes[categories == c],
            detections.scores[categories == c],
            objects[object_categories == c],
            crowd[object_categories == c],
        )
        for c in np.union1d(categories, object_categories)
    }
