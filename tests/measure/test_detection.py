from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import DataError, UsageError
from edgeq.measure.boxes import Detections
from edgeq.measure.task import TaskOptions, make_task
from edgeq.measure.tasks.detection import Detection, input_size
from tests.measure.fakes import FakeSample

pytest.importorskip("faster_coco_eval", reason="the coco extra is not installed")


def truth(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "images": [
            {"id": 7, "file_name": "sub/a.jpg", "width": 100, "height": 50},
            {"id": 9, "file_name": "b.jpg", "width": 40, "height": 80},
        ],
        "categories": [{"id": 3, "name": "cup"}, {"id": 1, "name": "dog"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 1, "bbox": [10, 10, 40, 30], "area": 1200, "iscrowd": 0},
            {"id": 2, "image_id": 9, "category_id": 3, "bbox": [5, 20, 20, 40], "area": 800, "iscrowd": 0},
        ],
    }
    return content | changes


def make(tmp_path: Path, *, decoder: str = "ssd", **changes: Any) -> Any:
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(truth(**changes)))
    return make_task("detection", TaskOptions(annotations=str(path), decoder=decoder))  # type: ignore[arg-type]


def sample(name: str, **context: Any) -> FakeSample:
    return FakeSample(
        name, {"x": np.zeros((1, 3, 60, 60), np.float32)}, context={"file": name, "input_size": (60, 60)} | context
    )


A = sample("a.jpg", original_size=(100, 50), scale=(0.6, 0.6), offset=(0.0, 15.0))
B = sample("b.jpg", original_size=(40, 80), scale=(0.75, 0.75), offset=(15.0, 0.0))


def outputs(box: list[float], category: int, sample: FakeSample) -> dict[str, np.ndarray]:
    """Return the outputs of an SSD head that sees `box` (x, y, w, h in the original image), letterboxed to 60x60."""
    x, y, w, h = box
    corners = np.array([x, y, x + w, y + h]) * np.tile(sample.context["scale"], 2)
    corners += np.tile(sample.context["offset"], 2)
    scores = np.zeros((1, 1, 3))
    scores[0, 0, 1 + category] = 0.9
    return {"boxes": (corners / 60)[None, None], "scores": scores}


def test_a_perfect_detector_has_full_precision(tmp_path: Path) -> None:
    task = make(tmp_path)
    assert (task.name, task.primary) == ("detection", "mAP50-95")
    meter = task.start()
    meter.update(outputs([10, 10, 40, 30], 0, A), A)
    meter.update(outputs([5, 20, 20, 40], 1, B), B)
    assert meter.result() == pytest.approx({"mAP50-95": 1.0, "mAP50": 1.0, "mAP75": 1.0, "AR100": 1.0})


def test_a_shifted_box_and_a_wrong_class(tmp_path: Path) -> None:
    meter = make(tmp_path).start()
    meter.update(outputs([10, 10, 40, 24], 0, A), A)  # IoU 0.8 is right at 0.50 to 0.80, seven of ten thresholds
    meter.update(outputs([5, 20, 20, 40], 0, B), B)
    metrics = meter.result()
    # Category dog has two detections; the first one is right (equal scores are ranked by image order). Cup has none.
    assert metrics["mAP50"] == pytest.approx(0.5)
    assert metrics["mAP50-95"] == pytest.approx(0.35, abs=0.051)


def test_only_images_seen_count(tmp_path: Path) -> None:
    meter = make(tmp_path).start()
    meter.update(outputs([10, 10, 40, 30], 0, A), A)
    assert meter.result()["mAP50-95"] == pytest.approx(1.0)


def test_nothing_found_is_zero(tmp_path: Path) -> None:
    meter = make(tmp_path).start()
    meter.update({"boxes": np.zeros((1, 1, 4)), "scores": np.zeros((1, 1, 3))}, A)
    assert set(meter.result().values()) == {0.0}


@pytest.mark.parametrize("annotations", [[], [truth()["annotations"][0] | {"iscrowd": 1}]])
def test_no_annotated_object_is_refused(tmp_path: Path, annotations: list[Any]) -> None:
    meter = make(tmp_path, annotations=annotations).start()
    meter.update(outputs([10, 10, 40, 30], 0, A), A)
    with pytest.raises(DataError, match="no object is annotated"):
        meter.result()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (sample("c.jpg"), "lists no image 'c.jpg'"),
        (sample("a.jpg", original_size=(50, 100)), "50x100, but annotated as 100x50"),
        (sample("a.jpg"), "boxes cannot be mapped from the model's 60x60 to the image's 100x50"),
        (FakeSample("a.jpg", {"x": np.zeros((2, 3, 60, 60))}), "is not one image"),
        (FakeSample("a.jpg", {"x": np.zeros((1, 9, 60, 60))}), "is not one image"),
    ],
)
def test_samples_that_cannot_be_placed(tmp_path: Path, given: FakeSample, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(tmp_path).start().update(outputs([10, 10, 40, 30], 0, A), given)


def test_an_image_of_the_models_size_needs_no_geometry(tmp_path: Path) -> None:
    images = [{"id": 7, "file_name": "a.jpg", "width": 60, "height": 60}]
    meter = make(tmp_path, images=images).start()
    scores = np.array([[[0.1, 0.9, 0.0]]])
    meter.update({"boxes": np.array([[[10, 10, 50, 40]]]) / 60, "scores": scores}, sample("a.jpg"))
    assert meter.result()["mAP50-95"] == pytest.approx(1.0)


def test_an_image_twice_is_refused(tmp_path: Path) -> None:
    meter = make(tmp_path).start()
    meter.update(outputs([10, 10, 40, 30], 0, A), A)
    with pytest.raises(DataError, match="comes twice"):
        meter.update(outputs([10, 10, 40, 30], 0, A), A)


def test_more_classes_than_categories_are_refused(tmp_path: Path) -> None:
    task = make(tmp_path)

    def decoder(outputs: object, size: object) -> Detections:
        return Detections(np.zeros((1, 4)), np.ones(1), np.array([2]))

    meter = Detection(task.annotations, decoder).start()
    with pytest.raises(DataError, match="has 2 categories, but the model's classes go up to 2"):
        meter.update({}, A)


def test_detection_needs_annotations_and_a_decoder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs annotations"):
        make_task("detection")
    task = make(tmp_path)
    with pytest.raises(UsageError, match="needs a decoder"):
        Detection(task.annotations, None).start()
    unlike = (FakeSample(inputs={"x": np.zeros((1, 3, 64, 64))}), {"y": np.zeros((1, 10))})
    with pytest.raises(UsageError, match=r"no decoder is known for the outputs y \[1, 10\]\. Choose `decoder`"):
        Detection(task.annotations, None).settled(iter([unlike]))
    with pytest.raises(UsageError, match=r"`iou` is 1\.5"):
        Detection(task.annotations, task.decoder, iou=1.5)


@pytest.mark.parametrize(("shape", "size"), [((1, 3, 20, 30), (30, 20)), ((1, 20, 30, 3), (30, 20))])
def test_input_size_in_either_layout(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    assert input_size(FakeSample(inputs={"x": np.zeros(shape)})) == size
