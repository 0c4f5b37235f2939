"""Test the readers of metadata in ONNX files, with the texts that their writers write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeq.data.preprocess import load_preprocess
from edgeq.describe.facts import Exported, ModelFacts
from edgeq.describe.read import read_facts
from edgeq.errors import DataError

POSE = {
    "description": "Ultralytics YOLO11n-pose model trained on coco-pose.yaml",
    "author": "Ultralytics",
    "version": "8.3.162",
    "license": "AGPL-3.0 License (https://ultralytics.com/license)",
    "stride": "32",
    "task": "pose",
    "batch": "1",
    "imgsz": "[256, 320]",
    "names": "{0: 'person'}",
    "args": "{'batch': 1, 'fraction': 1.0, 'half': False, 'int8': True, 'nms': False}",
    "channels": "3",
    "kpt_shape": "[2, 3]",
    "kpt_names": "{0: ['nose', 'left_eye']}",
}


def read(metadata: dict[str, str], path: Path, **options: Any) -> ModelFacts:
    return read_facts(Exported(metadata, path / "model.onnx", **options))


def arithmetic(facts: ModelFacts) -> str:
    assert facts.preprocess is not None
    return "\n".join(load_preprocess(facts.preprocess.value).arithmetic())


def test_reads_a_pose_model_of_ultralytics(tmp_path: Path) -> None:
    facts = read(POSE, tmp_path, size=(320, 256))
    assert {name: fact.value for name, fact in facts.stated.items()} == {
        "task": "pose",
        "preprocess": "yolo",
        "labels": ("person",),
        "keypoints": (2, 3),
        "keypoint_names": ("nose", "left_eye"),
    }
    assert facts.notes == ()
    assert facts.task is not None
    assert facts.task.source == "task 'pose' in the model's metadata"


def test_notes_another_size_of_the_input(tmp_path: Path) -> None:
    (note,) = read(POSE, tmp_path, size=(640, 640)).notes
    assert "imgsz in the model's metadata is 256 x 320, but the input is 640 x 640" in note


@pytest.mark.parametrize("names", ["{0: 'a', 1: 'b'}", "['a', 'b']", "{'0': 'a', '1': 'b'}", "('a', 'b')"])
def test_a_model_of_yolov5_has_only_stride_and_names(tmp_path: Path, names: str) -> None:
    facts = read({"stride": "32", "names": names}, tmp_path)
    assert facts.labels is not None
    assert facts.labels.value == ("a", "b")
    assert facts.task is not None
    assert facts.task.value == "detect"


def test_a_classifier_of_ultralytics_has_no_mean(tmp_path: Path) -> None:
    lines = arithmetic(read({**POSE, "task": "classify"}, tmp_path, size=(192, 192)))
    assert "the shorter side becomes 192" in lines
    assert "the centre 192 x 192 is kept" in lines
    assert "x = x / 255" in lines
    assert "-" not in lines.rpartition("x = x / 255")[2]


def test_rt_detr_is_stretched(tmp_path: Path) -> None:
    facts = read({**POSE, "task": "detect", "head": "RTDETRDecoder"}, tmp_path)
    assert "aspect not kept" in arithmetic(facts)


def test_end2end_and_nms_become_a_note(tmp_path: Path) -> None:
    for further in ({"end2end": "True"}, {"args": "{'nms': True}"}):
        assert "suppresses boxes itself" in read({**POSE, **further, "imgsz": "[1]"}, tmp_path).notes[0]


def test_the_outputs_decide_if_head_and_task_differ(tmp_path: Path) -> None:
    facts = read({**POSE, "head": "Segment"}, tmp_path)
    assert facts.task is None
    assert "task 'pose' and head 'Segment'" in facts.notes[0]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("names", "{0: 'a', 2: 'b'}"),
        ("names", "__import__('os').system('x')"),
        ("names", "{0: ['a']}"),
        ("names", "3"),
        ("args", "{1, 2}"),
        ("imgsz", "[" * 50),
    ],
)
def test_damaged_metadata_is_one_line_that_names_it(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(DataError, match=f"'{key}' in the model's metadata") as caught:
        read({**POSE, key: text}, tmp_path)
    assert "\n" not in caught.value.problem


def test_reads_metadata_yaml_next_to_other_formats(tmp_path: Path) -> None:
    (tmp_path / "metadata.yaml").write_text(
        "description: Ultralytics YOLOv8n model\nstride: 32\ntask: detect\nimgsz:\n- 640\n- 640\n"
        "names:\n  0: person\n  1: 'no'\nargs:\n  nms: false\n"
    )
    facts = read({}, tmp_path)
    assert facts.labels is not None
    assert facts.labels.source == f"names in {tmp_path / 'metadata.yaml'}"
    assert facts.labels.value[0] == "person"


def test_a_dictionary_of_rapidocr_keeps_spaces_and_rare_line_ends(tmp_path: Path) -> None:
    facts = read({"character": "'\n \n\u2028\n\x85\n\u3000\na"}, tmp_path)
    assert facts.labels is not None
    assert facts.labels.value == ("'", " ", "\u2028", "\x85", "\u3000", "a")
    assert facts.hints is not None
    assert facts.hints.value == {"blank": 0}


def test_one_line_is_no_dictionary(tmp_path: Path) -> None:
    assert read({"character": "a"}, tmp_path).stated == {}


def test_reads_the_model_info_of_openvino(tmp_path: Path) -> None:
    info = {
        "model_type": "YOLOX",
        "labels": "traffic_light stop",
        "mean_values": "123.675 116.28 103.53",
        "scale_values": "58.395 57.12 57.375",
        "reverse_input_channels": "True",
        "resize_type": "fit_to_window_letterbox",
        "pad_value": "114",
        "confidence_threshold": "0.35",
        "iou_threshold": "0.5",
    }
    facts = read({f"model_info {key}": value for key, value in info.items()}, tmp_path)
    assert facts.labels is not None
    assert facts.labels.value == ("traffic light", "stop")
    assert facts.thresholds is not None
    assert facts.thresholds.value == {"confidence": 0.35, "iou": 0.5}
    lines = arithmetic(facts)
    assert "of value 114" in lines
    assert "x = x - [123.675, 116.28, 103.53]" in lines
    assert "x = x / [58.395, 57.12, 57.375]" in lines
    assert "blue" not in lines


def test_refuses_a_way_to_resize_only_when_it_is_used(tmp_path: Path) -> None:
    facts = read({"model_info resize_type": "crop"}, tmp_path)
    assert facts.preprocess is not None
    with pytest.raises(DataError, match="edgeq has no steps for model_info resize_type"):
        _ = facts.preprocess.value


def test_a_threshold_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'model_info confidence_threshold' in the model's metadata is 'nan'"):
        read({"model_info confidence_threshold": "nan"}, tmp_path)


def test_reads_sherpa_onnx_with_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokens.txt").write_text("<blk> 0\na 1\n  2\n# 3\n", encoding="utf-8")
    metadata = {"model_type": "zipformer2_ctc", "vocab_size": "4", "sample_rate": "16000", "version": "1"}
    facts = read(metadata, tmp_path)
    assert facts.labels is not None
    assert facts.labels.value == ("a", " ", "#")
    assert facts.hints is not None
    assert facts.hints.value == {"blank": 0}
    assert facts.task is not None
    assert facts.task.value == "text"
    assert "16000 Hz" in facts.notes[0]


def test_tokens_of_another_model_are_refused_when_used(tmp_path: Path) -> None:
    (tmp_path / "tokens.txt").write_text("<blk> 0\na 1\n")
    facts = read({"model_type": "wenet_ctc", "vocab_size": "5538"}, tmp_path)
    assert facts.labels is not None
    with pytest.raises(DataError, match="has 2 symbols, but vocab_size in the model's metadata is 5538"):
        _ = facts.labels.value


def test_recognises_anomalib_by_its_outputs(tmp_path: Path) -> None:
    facts = read({}, tmp_path, outputs=("pred_score", "anomaly_map"))
    assert facts.task is not None
    assert facts.task.value == "anomaly"
    assert read({}, tmp_path, outputs=("pred_score", "y")).stated == {}
    assert read({}, tmp_path, outputs=()).stated == {}
