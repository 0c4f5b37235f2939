"""Find the heads of real detectors, and compare their answers with annotated objects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from edgeq_device.answers.decode import decode
from edgeq_device.answers.objects import compute_iou

from edgeq.data.images import find_frame
from edgeq.data.open_source import Data
from edgeq.data.samples import open_samples
from edgeq.describe.facts import Exported
from edgeq.describe.read import read_facts
from edgeq.measure.coco import load_annotations
from edgeq.measure.evaluation import EvalRequest, run_evaluation
from edgeq.measure.find_head import find_head
from edgeq.measure.inference import infer
from edgeq.measure.task import TaskOptions
from edgeq.model.load import model_signature
from edgeq.run.session import open_session
from tests.conftest import REPOSITORY

# Model → its family, preprocessing, and the least share of annotated objects that its answers must cover.
DETECTORS = {"yolox_nano": ("yolox", "yolox", 0.25), "yolo26n_e2e": ("detections", "yolo", 0.3)}


@pytest.mark.parametrize("name", DETECTORS)
def test_answers_cover_annotated_objects(shared_data: Path, name: str) -> None:
    family, preprocess, least = DETECTORS[name]
    model = shared_data / name / "model.onnx"
    if not model.is_file():
        pytest.skip(f"{name} is not in shared/data")
    signature, session = model_signature(model), open_session(model)
    samples = open_samples(Data(shared_data / "coco256" / "val", preprocess=preprocess, count=12), signature)
    metadata = {entry.key: entry.value for entry in onnx.load(model).metadata_props}
    facts = read_facts(Exported(metadata, model))
    head = find_head(session, signature, next(iter(samples)), facts)
    assert head is not None
    assert head.family == family
    annotations = load_annotations(shared_data / "coco256" / "instances_val.json")
    covered, objects = 0, 0
    for sample in samples:
        answer = decode(infer(session, sample), head, find_frame(sample.context))
        image = annotations.image(str(sample.context["path"]))
        for truth in image.annotations:
            x, y, width, height = truth["bbox"]
            right = answer.boxes[answer.classes == annotations.categories.index(truth["category_id"])]
            covered += bool((compute_iou(np.array([x, y, x + width, y + height]), right) > 0.5).any())
            objects += 1
    assert covered / objects > least


def test_yolo26_needs_no_suppression(shared_data: Path) -> None:
    """mAP of the float model on all 128 images is 37.46 without suppression; these are the first 32."""
    pytest.importorskip("faster_coco_eval")
    model, folder = shared_data / "yolo26n_e2e" / "model.onnx", shared_data / "coco256"
    if not model.is_file():
        pytest.skip("yolo26n_e2e is not in shared/data")
    options = TaskOptions(annotations=folder / "instances_val.json")
    data = Data(folder / "val", count=32)
    result = run_evaluation(EvalRequest(model, data, "detection", options, preprocess="yolo"))
    assert result.accuracy is not None
    assert result.accuracy.value == pytest.approx(0.374, abs=0.02)


def test_ultraface_finds_faces(shared_data: Path) -> None:
    folder = shared_data / "ultraface_rfb320"
    if not (folder / "model.onnx").is_file():
        pytest.skip("ultraface_rfb320 is not in shared/data")
    signature, session = model_signature(folder / "model.onnx"), open_session(folder / "model.onnx")
    recipe = str(REPOSITORY / "benchmarks" / "specs" / "ultraface_rfb320.toml")
    samples = open_samples(Data(folder / "img", preprocess=recipe), signature)
    head = find_head(session, signature, next(iter(samples)), read_facts(Exported({}, folder / "model.onnx")))
    assert head is not None
    assert head.family == "ssd"
    counts = []
    for sample in samples:
        frame = find_frame(sample.context)
        assert frame is not None
        answer = decode(infer(session, sample), head, frame)
        middles = (answer.boxes[:, :2] + answer.boxes[:, 2:]) / 2
        assert ((middles >= 0) & (middles <= frame.original)).all()
        counts.append(len(answer))
    assert sum(counts) > 300
