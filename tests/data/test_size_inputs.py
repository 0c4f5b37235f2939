"""Feed models that learn the size of the stored image from a second input: samples fill it from the image."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from PIL import Image

from edgeq.data.samples import open_samples
from edgeq.errors import DataError
from edgeq.measure.evaluation import EvalRequest, run_evaluation
from edgeq.measure.task import TaskOptions
from edgeq.model.load import model_signature
from tests.answers.test_size_inputs import DETECTOR
from tests.graphs import proto


def test_samples_of_images_have_their_size(tmp_path: Path) -> None:
    onnx.save(proto(DETECTOR), tmp_path / "model.onnx")
    (tmp_path / "images").mkdir()
    Image.new("RGB", (50, 20)).save(tmp_path / "images" / "a.png")
    signature = model_signature(tmp_path / "model.onnx")
    (sample,) = open_samples(tmp_path / "images", signature, preprocess="yolo")
    assert sample.inputs["orig_target_sizes"].tolist() == [[50, 20]]
    assert sample.inputs["images"].shape == (1, 3, 8, 8)
    unknown = DETECTOR.replace("orig_target_sizes", "prior")
    onnx.save(proto(unknown), tmp_path / "model.onnx")
    with pytest.raises(DataError):
        next(iter(open_samples(tmp_path / "images", model_signature(tmp_path / "model.onnx"), preprocess="yolo")))


def test_boxes_in_the_stored_image_are_measured_as_they_are(tmp_path: Path) -> None:
    """The detector gives the whole stored image as its one object, of class 1, although the input is a square."""
    pytest.importorskip("faster_coco_eval")
    onnx.save(proto(DETECTOR), tmp_path / "model.onnx")
    (tmp_path / "images").mkdir()
    Image.new("RGB", (50, 20)).save(tmp_path / "images" / "a.png")
    coco = {
        "images": [{"id": 1, "file_name": "a.png", "width": 50, "height": 20}],
        "categories": [{"id": 1, "name": "cup"}, {"id": 2, "name": "dog"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 2, "bbox": [0, 0, 50, 20], "area": 1000, "iscrowd": 0}],
    }
    (tmp_path / "instances.json").write_text(json.dumps(coco))
    options = TaskOptions(annotations=tmp_path / "instances.json")
    request = EvalRequest(tmp_path / "model.onnx", tmp_path / "images", "detection", options, preprocess="yolo")
    accuracy = run_evaluation(request).accuracy
    assert accuracy is not None
    assert accuracy.value == pytest.approx(1.0)
