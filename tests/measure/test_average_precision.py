"""Compare mAP over selections of images with the COCO package, to the last digits."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest

from edgeq.measure import coco
from edgeq.measure.average_precision import mean_average_precisions
from edgeq.measure.boxes import Detections

CATEGORIES = (2, 3, 7)
ANNOTATIONS = coco.CocoAnnotations("test", MappingProxyType({}), CATEGORIES)


def images(seed: int) -> list[tuple[coco.Image, Detections]]:
    """Return six images with crowds, equal scores and equal boxes. Only one image has objects of category 7."""
    random = np.random.default_rng(seed)
    annotated = []
    for identity in range(6):
        objects = np.concatenate([random.uniform(0, 60, (8, 2)), random.uniform(5, 40, (8, 2))], axis=1)
        categories = random.choice(CATEGORIES if identity == 3 else CATEGORIES[:2], 8)
        truth = tuple(
            {"image_id": identity, "category_id": int(c), "bbox": box.tolist(), "area": 1.0, "iscrowd": int(i == 0)}
            for i, (box, c) in enumerate(zip(objects, categories, strict=True))
        )
        boxes = np.concatenate([objects + random.normal(0, 2, objects.shape), objects[:3]])
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + np.abs(boxes[:, 2:])], axis=1)
        classes = np.array([CATEGORIES.index(c) for c in (*categories, *categories[:3])])
        scores = random.integers(1, 6, len(corners)) / 5
        annotated.append((coco.Image(identity, None, truth), Detections(corners, scores, classes)))
    return annotated


@pytest.mark.parametrize("seed", range(4))
def test_every_choice_has_the_packages_value(seed: int) -> None:
    try:
        package = coco.load_package()
    except coco.RuntimeUnavailableError as error:
        pytest.skip(str(error))
    annotated = images(seed)
    matches = [coco.match_image(ANNOTATIONS, *pair) for pair in annotated]
    selections = np.random.default_rng(seed).random((8, 6)) < 0.5
    selections[0], selections[1] = True, np.arange(6) == 3
    values = mean_average_precisions(matches, selections)
    for choice, value in zip(selections, values, strict=True):
        some = [pair for pair, is_selected in zip(annotated, choice, strict=True) if is_selected]
        if some:
            expected = coco.mean_average_precision(ANNOTATIONS, some, package)["mAP50-95"]
            assert value == pytest.approx(expected, abs=1e-12)
    assert 0 < values[0] < 1


def test_images_without_objects_have_no_value_and_no_detections_find_nothing() -> None:
    nothing = Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))
    annotated = coco.Image(
        1, None, ({"category_id": 2, "bbox": [0, 0, 5, 5], "area": 25.0, "iscrowd": 0, "image_id": 1},)
    )
    matches = [coco.match_image(ANNOTATIONS, image, nothing) for image in (annotated, coco.Image(2, None))]
    values = mean_average_precisions(matches, np.array([[True, False], [False, True], [False, False]]))
    assert values[0] == 0
    assert np.isnan(values[1:]).all()
