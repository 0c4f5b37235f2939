from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import DataError, RuntimeUnavailableError
from edgeq.measure import coco
from edgeq.measure.boxes import Detections

GOOD: dict[str, Any] = {
    "images": [{"id": 1, "file_name": "a.jpg"}],
    "categories": [{"id": 4}, {"id": 2, "name": "dog"}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4]}],
}

BOX = GOOD["annotations"][0]


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_reads_images_and_annotations(tmp_path: Path) -> None:
    annotations = coco.load_annotations(write(tmp_path / "i.json", GOOD))
    assert annotations.categories == (2, 4)
    image = annotations.images["a.jpg"]
    assert (image.id, image.size) == (1, None)
    assert image.annotations[0]["area"] == 12.0


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ([], "not a COCO instances file"),
        (GOOD | {"annotations": None}, "not a COCO instances file"),
        ({k: v for k, v in GOOD.items() if k != "categories"}, "'categories'"),
        (GOOD | {"annotations": [{"image_id": 1, "category_id": 2, "bbox": [1, 2]}]}, "not a COCO instances file"),
        (GOOD | {"annotations": [{"image_id": 1, "category_id": 5, "bbox": [1, 2, 3, 4]}]}, "unknown category 5"),
        (GOOD | {"annotations": [BOX | {"bbox": [1, 2, -3, 4]}]}, r"image 1 with a box of \[1, 2, -3, 4\]"),
        (GOOD | {"annotations": [BOX | {"bbox": [1, 2, float("nan"), 4]}]}, "image 1 with a box of"),
        (GOOD | {"images": [{"id": 1.5, "file_name": "a.jpg"}]}, "id 1.5"),
        (GOOD | {"images": [{"id": 1, "file_name": "a.jpg"}, {"id": 1, "file_name": "b.jpg"}]}, "shares its id 1"),
        (GOOD | {"images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "a.jpg"}]}, "or its name"),
    ],
)
def test_damaged_files(tmp_path: Path, plain: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        coco.load_annotations(write(tmp_path / "i.json", plain))


def test_images_are_found_by_path_and_by_a_name_that_is_theirs_alone(tmp_path: Path) -> None:
    files = {1: "x/a.jpg", 2: "y/a.jpg", 3: "y\\b.jpg"}
    images = [{"id": number, "file_name": file} for number, file in files.items()]
    annotations = coco.load_annotations(write(tmp_path / "i.json", GOOD | {"images": images}))
    assert [annotations.image(path).id for path in ("x/a.jpg", "y/a.jpg", "y/b.jpg", "b.jpg", "z/b.jpg")] == [
        1,
        2,
        3,
        3,
        3,
    ]
    with pytest.raises(DataError, match=r"lists no image 'a.jpg' but 'x/a.jpg', 'y/a.jpg'"):
        annotations.image("a.jpg")
    with pytest.raises(DataError, match=r"lists no image .c.jpg."):
        annotations.image("x/c.jpg")


def test_files_that_are_no_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "i.json"
    with pytest.raises(DataError, match="cannot be read"):
        coco.load_annotations(path)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(DataError, match="is not JSON"):
        coco.load_annotations(path)
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match="is not JSON"):
        coco.load_annotations(path)
    monkeypatch.setattr(coco, "MAX_FILE_BYTES", 10)
    with pytest.raises(DataError, match="larger than"):
        coco.load_annotations(path)


def test_no_package_is_a_clear_error() -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"neither .* pip install faster-coco-eval"):
        coco.load_package([("edgeq_no_such_package:COCO", "edgeq_no_such_package:COCOeval")])


def test_both_packages_agree(tmp_path: Path) -> None:
    for package in (truth.split(":")[0].split(".")[0] for truth, _ in coco.PACKAGES):
        pytest.importorskip(package)
    rng = np.random.default_rng(1)
    corners = rng.uniform(0, 60, (40, 2))
    boxes = np.concatenate([corners, rng.uniform(5, 40, (40, 2))], axis=1)
    content = {
        "images": [{"id": i, "file_name": f"{i}.jpg", "width": 100, "height": 100} for i in range(4)],
        "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}],
        "annotations": [
            {"image_id": i % 4, "category_id": 1 + i % 2, "bbox": box.tolist()} for i, box in enumerate(boxes)
        ],
    }
    annotations = coco.load_annotations(write(tmp_path / "i.json", content))
    detections = []
    for i in range(4):
        detected = boxes[i::4] + rng.normal(0, 2, (10, 4))
        corners = np.concatenate([detected[:, :2], detected[:, :2] + detected[:, 2:]], axis=1)
        classes = (np.arange(i, 40, 4) % 2).astype(np.int64)
        detections.append((annotations.images[f"{i}.jpg"], Detections(corners, rng.uniform(size=10), classes)))
    metrics, other_metrics = (
        coco.mean_average_precision(annotations, detections, coco.load_package([package])) for package in coco.PACKAGES
    )
    assert 0.1 < metrics["mAP50-95"] < 1
    assert metrics == pytest.approx(other_metrics, abs=1e-9)
