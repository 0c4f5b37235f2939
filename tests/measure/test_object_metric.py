"""Measure objects with masks, keypoints and rotated boxes. A COCO package is the reference of the module's matching."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.answers.answer import Answer

from edgeq.data.sample import Sample
from edgeq.errors import DataError, UsageError
from edgeq.measure.answer_metric import AnswerMetric
from edgeq.measure.coco import load_annotations, load_package, score_results
from edgeq.measure.object_metric import load_mask_tools, to_runs
from edgeq.measure.task import TaskOptions, make_task

pytest.importorskip("faster_coco_eval")
SIDE, IMAGES = 64, 12


def make_scene(folder: Path, seed: int) -> tuple[Path, list[Answer]]:
    """Write annotations of random objects, and return answers that differ from them a little."""
    random = np.random.default_rng(seed)
    images, annotations, answers = [], [], []
    for number in range(IMAGES):
        images.append({"id": number, "file_name": f"{number}.png", "width": SIDE, "height": SIDE})
        masks, points, boxes, scores, classes = [], [], [], [], []
        for _ in range(int(random.integers(1, 5))):
            x, y, w, h = (float(n) for n in (*random.uniform(0, 35, 2), *random.uniform(8, 25, 2)))
            category = int(random.integers(0, 3))
            outline = [x, y, x + w, y, x + w, y + h, x, y + h]
            shape = random.uniform((x, y), (x + w, y + h), (17, 2))
            visible = random.integers(0, 3, 17)
            annotations.append(
                {
                    "image_id": number,
                    "category_id": category,
                    "bbox": [x, y, w, h],
                    "area": w * h,
                    "iscrowd": 0,
                    "segmentation": [outline],
                    "keypoints": np.concatenate([shape, visible[:, None]], axis=1).reshape(-1).tolist(),
                    "num_keypoints": int((visible > 0).sum()),
                }
            )
            for _ in range(int(random.integers(0, 3))):
                dx, dy = random.normal(0, 2, 2)
                box = np.array([x + dx, y + dy, x + w + dx, y + h + dy])
                mask = np.zeros((SIDE, SIDE), bool)
                x1, y1, x2, y2 = np.clip(np.rint(box), 0, SIDE).astype(int)
                mask[y1:y2, x1:x2] = True
                masks.append(mask)
                boxes.append(box)
                noise = random.normal(0, 2, (17, 2))
                points.append(np.concatenate([shape + noise, np.ones((17, 1))], axis=1))
                scores.append(random.random())
                classes.append(category)
        order = np.argsort(-np.array(scores))
        answers.append(
            Answer(
                "segment",
                boxes=np.array(boxes).reshape(-1, 4)[order],
                scores=np.array(scores)[order],
                classes=np.array(classes, np.int64)[order],
                angles=np.zeros(len(order)),
                masks=np.array(masks, bool).reshape(-1, SIDE, SIDE)[order],
                keypoints=np.array(points).reshape(-1, 17, 3)[order],
                image_size=(SIDE, SIDE),
            )
        )
    categories = [{"id": n, "name": f"c{n}"} for n in range(3)]
    path = folder / f"{seed}.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}), "utf-8")
    return path, answers


def read_all(task: Any, answers: list[Answer]) -> list[Any]:
    assert isinstance(task, AnswerMetric)
    return [task.read(answer, Sample(f"{n}", {}, context={"file": f"{n}.png"})) for n, answer in enumerate(answers)]


@pytest.mark.parametrize("name", ["instance-segmentation", "keypoints"])
@pytest.mark.parametrize("seed", range(4))
def test_own_matching_is_that_of_the_package(tmp_path: Path, name: str, seed: int) -> None:
    path, answers = make_scene(tmp_path, seed)
    task: Any = make_task(name, TaskOptions(annotations=path))
    values = read_all(task, answers)
    package, own = task.finish(values), task.summarize(values)
    assert 0 < package["mAP50-95"] < 1
    assert own["mAP50-95"] == pytest.approx(package["mAP50-95"], abs=1e-9)
    assert own["mAP50"] == pytest.approx(package["mAP50"], abs=1e-9)


def test_upright_rotated_boxes_have_the_figures_of_boxes(tmp_path: Path) -> None:
    path, answers = make_scene(tmp_path, 7)
    task: Any = make_task("oriented-detection", TaskOptions(annotations=path))
    annotations = load_annotations(path)
    boxes = [
        {"image_id": n, "category_id": int(c), "score": float(s), "bbox": [x1, y1, x2 - x1, y2 - y1]}
        for n, answer in enumerate(answers)
        for (x1, y1, x2, y2), s, c in zip(answer.boxes.tolist(), answer.scores, answer.classes, strict=True)
    ]
    expected = score_results(annotations, list(annotations.images.values()), boxes, load_package())
    values = task.finish(read_all(task, answers))
    assert values["mAP50-95"] == pytest.approx(expected["mAP50-95"], abs=1e-9)
    assert values["mAP50"] == pytest.approx(expected["mAP50"], abs=1e-9)


def test_a_turned_box_is_another_box(tmp_path: Path) -> None:
    corners = [
        10 - 8 * math.sqrt(0.5),
        10,
        10,
        10 - 8 * math.sqrt(0.5),
        10 + 8 * math.sqrt(0.5),
        10,
        10,
        10 + 8 * math.sqrt(0.5),
    ]
    entry = {"image_id": 0, "category_id": 0, "bbox": [4, 4, 12, 12], "segmentation": [corners]}
    scene = {
        "images": [{"id": 0, "file_name": "0.png"}],
        "annotations": [entry],
        "categories": [{"id": 0, "name": "a"}],
    }
    (tmp_path / "a.json").write_text(json.dumps(scene), "utf-8")
    task: Any = make_task("oriented-detection", TaskOptions(annotations=tmp_path / "a.json"))
    box, score, category = np.array([[6.0, 6, 14, 14]]), np.ones(1), np.zeros(1, np.int64)
    for angle, expected in ((math.pi / 4, 1.0), (0.0, 0.5)):
        answer = Answer("obb", box, score, category, angles=np.array([angle]))
        assert task.finish(read_all(task, [answer]))["mAP50-95"] == pytest.approx(expected, abs=0.11)


def test_classes_have_the_categories_of_their_names(tmp_path: Path) -> None:
    path, answers = make_scene(tmp_path, 9)
    task: Any = make_task("keypoints", TaskOptions(annotations=path))
    expected = task.summarize(read_all(task, answers))
    renamed = [
        Answer(a.task, a.boxes, a.scores, 2 - a.classes, keypoints=a.keypoints, labels=("c2", "c1", "c0"))
        for a in answers
    ]
    assert task.summarize(read_all(task, renamed)) == expected


def test_runs_of_pixels_are_checked() -> None:
    tools = load_mask_tools()
    mask = np.random.default_rng(1).random((20, 30)) < 0.4
    run = tools.encode(np.asfortranarray(mask.astype(np.uint8)))
    counts = run["counts"].decode() if isinstance(run["counts"], bytes) else run["counts"]
    result = to_runs({"segmentation": {"size": [20, 30], "counts": counts}}, (30, 20))
    np.testing.assert_array_equal(tools.decode(result), mask)
    for wrong in ("", "zz", counts[:-3], "\x00\x7f", [1, 2], [-5, 605], [600.0], None):
        with pytest.raises(DataError, match="no segmentation"):
            to_runs({"segmentation": {"size": [20, 30], "counts": wrong}}, (30, 20))
    with pytest.raises(DataError, match="polygons"):
        to_runs({"segmentation": [[0, 0, 1, float("nan"), 2, 2]]}, (30, 20))
    assert tools.area(to_runs({"segmentation": [[-1e9, -1e9, 1e9, -1e9, 1e9, 1e9, -1e9, 1e9]]}, (30, 20))) == 600


def test_annotations_are_necessary() -> None:
    with pytest.raises(UsageError, match="needs annotations"):
        make_task("keypoints")


def test_workers_receive_the_task(tmp_path: Path) -> None:
    path, answers = make_scene(tmp_path, 3)
    task: Any = make_task("instance-segmentation", TaskOptions(annotations=path))
    values = read_all(pickle.loads(pickle.dumps(task)), answers)
    assert task.finish(pickle.loads(pickle.dumps(values))) == task.finish(read_all(task, answers))
