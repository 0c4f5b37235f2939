"""Decode real models of keypoints, faces and masks on real images, with the runner's code alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.decode import decode
from edgeq_device.answers.family import View, all_families
from edgeq_device.answers.head import Head
from edgeq_device.prepare.steps import Prepare
from PIL import Image, ImageDraw

from edgeq.data.preprocess import shipped

DATA = Path(__file__).parents[3] / "shared" / "data"


def read_steps(name: str) -> dict[str, Any]:
    """Return a preprocessing whose letterbox rounds, as the scripts did which measured the recorded figures."""
    spec = dict(shipped()[name])
    spec["steps"] = [{**step, **({"rounding": "round"} if step["op"] == "letterbox" else {})} for step in spec["steps"]]
    return spec


def answer_images(model: str, family: str, images: list[Path]) -> Iterator[Answer]:
    """Yield the answer for each image. Exactly one family takes the outputs for the first one."""
    onnxruntime = pytest.importorskip("onnxruntime")
    path = DATA / model / "model.onnx"
    if not path.exists() or not images:
        pytest.skip(f"{path} is absent")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (spec,) = session.get_inputs()
    names = [output.name for output in session.get_outputs()]
    head = None
    for image in images:
        array, frame = Prepare(read_steps("yunet" if family == "yunet" else "yolo"), spec.shape).prepare(image)
        outputs = dict(zip(names, session.run(None, {spec.name: array.astype(np.float32)}), strict=True))
        assert frame is not None
        if head is None:
            fits = [(f, fit) for f in all_families() if (fit := f.fit(View(outputs, frame.size))) is not None]
            assert [f.name for f, _ in fits] == [family]
            head = Head(family, fits[0][1].outputs, fits[0][1].parameters, fits[0][0].thresholds)
        yield decode(outputs, head, frame)


def test_finds_the_faces_of_yunet() -> None:
    images = sorted((DATA / "coco256" / "val").glob("*.jpg"))[:60]
    assert sum(map(len, answer_images("yunet_n_640", "yunet", images))) == 121


def test_places_the_eyes_of_a_face() -> None:
    images = list((DATA / "coco256" / "val").glob("000000004395.jpg"))
    (answer,) = answer_images("yunet_n_640", "yunet", images)
    assert answer.scores.round(2).tolist() == [0.93]
    np.testing.assert_allclose(answer.boxes, [[112, -2, 216, 128]], atol=1)
    assert answer.keypoints is not None
    np.testing.assert_allclose(answer.keypoints[0, :2, :2], [[172, 38], [204, 33]], atol=1)
    assert answer.keypoint_names[:2] == ("right_eye", "left_eye")


def test_finds_the_people_of_yolo_pose() -> None:
    images = sorted((DATA / "yolo11n_pose" / "data" / "images").rglob("*.jpg"))
    answers = list(answer_images("yolo11n_pose", "yolo-pose", images))
    assert sum(map(len, answers)) == 17
    assert {len(answer.keypoint_names) for answer in answers} == {17}


def test_finds_the_polygons_of_yolo_seg() -> None:
    images = sorted((DATA / "yolo11n_seg" / "data" / "images").rglob("*.jpg"))
    overlaps, count = [], 0
    for image, answer in zip(images, answer_images("yolo11n_seg", "yolo-seg", images), strict=True):
        assert answer.masks is not None
        label = Path(str(image).replace("images", "labels")).with_suffix(".txt")
        for line in label.read_text().splitlines():
            number, *values = line.split()
            canvas = Image.new("1", answer.image_size)
            points = np.array(values, np.float64).reshape(-1, 2) * canvas.size
            ImageDraw.Draw(canvas).polygon([tuple(point) for point in points], fill=1)
            truth = np.asarray(canvas)
            masks = answer.masks[answer.classes == int(number)]
            ious = (masks & truth).sum(axis=(1, 2)) / (masks | truth).sum(axis=(1, 2))
            overlaps += [ious.max()] if ious.size and ious.max() > 0.5 else []
            count += 1
    assert (len(overlaps), count) == (17, 30)
    assert np.mean(overlaps) == pytest.approx(0.781, abs=0.001)
