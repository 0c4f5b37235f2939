"""Test the readers of files next to a model, with files as their writers write them, and with damaged ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from edgeq.data.preprocess import load_preprocess
from edgeq.describe.facts import Exported, ModelFacts
from edgeq.describe.read import read_facts
from edgeq.errors import DataError, EdgeqError


def read(folder: Path, name: str = "model.onnx", **options: Any) -> ModelFacts:
    return read_facts(Exported({}, folder / name, **options))


def arithmetic(facts: ModelFacts) -> tuple[str, ...]:
    assert facts.preprocess is not None
    return load_preprocess(facts.preprocess.value).arithmetic()


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


# Hugging Face

VIT = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "ViTFeatureExtractor",
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 224, "width": 192},
}


def hf(folder: Path, **changes: Any) -> ModelFacts:
    write(folder / "preprocessor_config.json", {**VIT, **changes})
    return read(folder)


def test_reads_a_folder_of_transformers(tmp_path: Path) -> None:
    config = {"architectures": ["ViTForImageClassification"], "id2label": {"1": "dog", "0": "cat"}}
    write(tmp_path / "config.json", config)
    facts = hf(tmp_path)
    assert facts.labels is not None
    assert facts.labels.value == ("cat", "dog")
    assert facts.task is not None
    assert facts.task.value == "classify"
    assert arithmetic(facts)[0].startswith(
        "resized to 192 x 224 (width x height), aspect not kept; Pillow filter bilinear"
    )
    assert arithmetic(facts)[1:4] == ("x = x / 255.0", "x = x - 0.5", "x = x / 0.5")


def test_files_of_an_onnx_folder_are_one_folder_up(tmp_path: Path) -> None:
    write(tmp_path / "preprocessor_config.json", VIT)
    (tmp_path / "onnx").mkdir()
    assert read(tmp_path / "onnx").preprocess is not None
    (tmp_path / "other").mkdir()
    assert read(tmp_path / "other").preprocess is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}},
         "the shorter side becomes 256"),
        ({"size": {"max_height": 640, "max_width": 320}}, "r = min(W/w, H/h) for 320 x 640"),
        ({"size": {"max_height": 64, "max_width": 32}, "do_pad": True, "pad_size": {"height": 64, "width": 32}},
         "placed at the top left of W x H pixels of value 0"),
        ({"size": 224}, "resized to 224 x 224"),
        ({"size": 224, "image_processor_type": "CLIPImageProcessor"}, "the shorter side becomes 224"),
        ({"size": {"shortest_edge": 224}, "image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.875},
         "the shorter side becomes 256"),
        ({"size": {"shortest_edge": 384}, "image_processor_type": "ConvNextImageProcessorFast"}, "aspect not kept"),
        ({"resample": 3}, "Pillow filter bicubic"),
        ({"resample": None}, "Pillow filter bilinear"),
        ({"do_rescale": False}, "Pillow filter bilinear"),
    ],
)  # fmt: skip
def test_ways_to_resize(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    lines = arithmetic(hf(tmp_path, **changes))
    assert expected in lines[0]
    assert any("/ 255" in line for line in lines) == (changes.get("do_rescale") is not False)


def test_a_key_that_is_null_means_the_default_of_the_class(tmp_path: Path) -> None:
    names = ("do_resize", "size", "resample", "do_normalize", "image_mean", "image_std", "do_rescale", "rescale_factor")
    lines = arithmetic(hf(tmp_path, image_processor_type="RTDetrImageProcessor", **dict.fromkeys(names)))
    assert "resized to 640 x 640" in lines[0]
    assert lines[1:-1] == ("x = x / 255.0",)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"do_center_crop": True}, "asks for a crop without its size"),
        ({"size": {"shortest_edge": 800, "longest_edge": 1333}}, "shortest_edge and longest_edge, which edgeq has no"),
        ({"size": {"width": 10**30, "height": 1}}, "not a size"),
        ({"size": [1, 2, 3]}, "not a size"),
        ({"resample": 9}, "resample 9 is no filter"),
        ({"image_std": [0, 1, 1]}, "a deviation is 0"),
        ({"image_mean": "x"}, "image_mean in .* is x, not numbers"),
        ({"image_mean": [float("nan")] * 3}, "not numbers"),
        ({"size": None, "image_processor_type": "MyImageProcessor"}, "leaves size to the class MyImageProcessor"),
    ],
)
def test_refuses_to_guess_when_the_preprocessing_is_used(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    facts = hf(tmp_path, **changes)
    assert facts.preprocess is not None
    with pytest.raises(DataError, match=problem):
        _ = facts.preprocess.value


def test_code_is_a_note_and_made_up_labels_are_none(tmp_path: Path) -> None:
    table = {"architectures": ["XForObjectDetection"], "auto_map": {"AutoModel": "modeling_x.XModel"}}
    write(tmp_path / "config.json", {**table, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}})
    facts = read(tmp_path)
    assert facts.labels is None
    assert "name code (auto_map), which edgeq does not run" in facts.notes[0]


def test_reads_the_alphabet_of_speech(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"architectures": ["Wav2Vec2ForCTC"], "model_type": "wav2vec2"})
    write(tmp_path / "preprocessor_config.json", {"feature_extractor_type": "W", "sampling_rate": 16000})
    write(tmp_path / "vocab.json", {"<pad>": 0, "|": 1, "E": 2, "T": 3})
    write(tmp_path / "tokenizer_config.json", {"pad_token": "<pad>", "word_delimiter_token": "|"})
    facts = read(tmp_path)
    assert facts.preprocess is None
    assert facts.labels is not None
    assert facts.labels.value == (" ", "E", "T")
    assert facts.hints is not None
    assert facts.hints.value == {"blank": 0}


# timm

TIMM = {
    "architecture": "resnet18",
    "num_classes": 2,
    "label_names": ["a", "b"],
    "pretrained_cfg": {
        "input_size": [3, 224, 224],
        "test_input_size": [3, 288, 288],
        "interpolation": "bicubic",
        "crop_pct": 0.95,
        "test_crop_pct": 1.0,
        "crop_mode": "center",
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    },
}


def test_reads_timm_and_rounds_the_larger_size_down(tmp_path: Path) -> None:
    write(tmp_path / "config.json", TIMM)
    facts = read(tmp_path, size=(224, 224))
    assert "the shorter side becomes 235" in arithmetic(facts)[0]
    assert "bicubic" in arithmetic(facts)[0]
    assert facts.labels is not None
    assert facts.labels.value == ("a", "b")
    assert "the shorter side becomes 288" in arithmetic(read(tmp_path, size=(288, 288)))[0]


def test_reads_the_flat_table_of_old_timm(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {**TIMM["pretrained_cfg"], "labels": ["a", "b"], "num_classes": 2})  # type: ignore[dict-item]
    facts = read(tmp_path)
    assert facts.labels is not None
    assert arithmetic(facts)


@pytest.mark.parametrize(
    "changes",
    [{"crop_pct": 2}, {"crop_pct": 1e-9}, {"interpolation": "random"}, {"crop_mode": "border"}, {"std": [0, 1]}],
)
def test_timm_without_a_matching_step_is_refused_when_used(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {"crop_pct": 0.9, **TIMM["pretrained_cfg"], **changes}  # type: ignore[dict-item]
    write(tmp_path / "config.json", {**TIMM, "pretrained_cfg": config})
    facts = read(tmp_path)
    assert facts.preprocess is not None
    with pytest.raises(DataError, match=r"config\.json"):
        _ = facts.preprocess.value


# Paddle

REC = """Global:
  model_name: PP-OCRv5_mobile_rec
PreProcess:
  transform_ops:
  - DecodeImage: {channel_first: false, img_mode: BGR}
  - MultiLabelEncode: {gtc_encode: NRTRLabelEncode}
  - RecResizeImg: {image_shape: [3, 48, 320]}
  - KeepKeys: {keep_keys: [image]}
PostProcess:
  name: CTCLabelDecode
  character_dict: ["'", 'y', 'no', ' ', '1', "\\u3000"]
"""
CLS = """PreProcess:
  transform_ops:
  - ResizeImage: {resize_short: 256}
  - CropImage: {size: 224}
  - NormalizeImage:
      {channel_num: 3, mean: [0.485, 0.456, 0.406], order: '', scale: 1./255., std: [0.229, 0.224, 0.225]}
  - ToCHWImage: null
PostProcess:
  Topk: {topk: 5, label_list: [cat, dog]}
"""


def test_reads_a_recogniser_of_paddle(tmp_path: Path) -> None:
    write(tmp_path / "inference.yml", REC)
    facts = read(tmp_path)
    assert facts.labels is not None
    assert facts.labels.value == ("'", "y", "no", " ", "1", "\u3000")
    assert facts.hints is not None
    assert facts.hints.value == {"blank": 0}


def test_reads_a_detector_of_text(tmp_path: Path) -> None:
    write(tmp_path / "inference.yml", "PostProcess: {name: DBPostProcess, thresh: 0.3, box_thresh: 0.6}\n")
    facts = read(tmp_path)
    assert facts.thresholds is not None
    assert facts.thresholds.value == {"pixel": 0.3, "confidence": 0.6}


def test_reads_a_classifier_of_paddle_and_divides_by_its_fraction(tmp_path: Path) -> None:
    write(tmp_path / "inference.yml", CLS)
    assert arithmetic(read(tmp_path))[2] == "x = x / 255.0"


@pytest.mark.parametrize("scale", ["__import__('os')", "1./0.", "1/2/3", "2**9", "1e999", "[1]"])
def test_evaluates_no_scale(tmp_path: Path, scale: str) -> None:
    write(tmp_path / "inference.yml", CLS.replace("1./255.", f'"{scale}"'))
    facts = read(tmp_path)
    assert facts.preprocess is not None
    with pytest.raises(DataError, match="not a number or a fraction"):
        _ = facts.preprocess.value


def test_reads_infer_cfg(tmp_path: Path) -> None:
    write(
        tmp_path / "infer_cfg.yml",
        """mode: paddle
draw_threshold: 0.5
arch: PicoDet
Preprocess:
- {interp: 2, keep_ratio: false, target_size: [416, 320], type: Resize}
- {is_scale: true, mean: [0.5, 0.5, 0.5], norm_type: mean_std, std: [0.5, 0.5, 0.5], type: NormalizeImage}
- {type: Permute}
label_list: [person, bicycle]
NMS: {keep_top_k: 100}
""",
    )
    facts = read(tmp_path)
    assert "resized to 320 x 416" in arithmetic(facts)[0]
    assert facts.thresholds is not None
    assert facts.thresholds.value == {"confidence": 0.5}
    assert facts.labels is not None
    assert facts.labels.value == ("person", "bicycle")


@pytest.mark.parametrize(
    "text",
    [
        "transform_ops: [",
        "transform_ops: !!python/object/apply:os.system [x]",
        "transform_ops: &a [1]\nb: *a\n",
        "transform_ops: " + "[" * 3000,
        "transform_ops: 2001-99-99",
        "transform_ops: " + "9" * 9000,
        "- transform_ops",
        "{[1]: transform_ops}",
        "transform_ops: \udc80",
    ],
    ids=lambda text: text[:24],
)
def test_damaged_yaml_is_one_line_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "inference.yml").write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=r"inference\.yml") as caught:
        read(tmp_path)
    assert "\n" not in caught.value.problem


# MMDeploy


def test_reads_mmdeploy(tmp_path: Path) -> None:
    write(tmp_path / "deploy.json", {"version": "1.3.1", "task": "Detector", "models": [], "customs": []})
    transforms = [
        {"type": "LoadImageFromFile"},
        {"type": "Resize", "size": [320, 256], "keep_ratio": True},
        {"type": "Pad", "size": [320, 256], "pad_val": {"img": [114, 114, 114]}},
        {"type": "Normalize", "mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375], "to_rgb": True},
        {"type": "ImageToTensor", "keys": ["img"]},
        {"type": "Collect", "keys": ["img"]},
    ]
    tasks = [
        {"type": "Task", "module": "Transform", "name": "Preprocess", "transforms": transforms},
        {"name": "yolox", "type": "Task", "module": "Net", "input_map": {"img": "input"}},
        {"type": "Task", "module": "mmdet", "component": "ResizeBBox", "params": {"score_thr": 0.01}},
    ]
    write(tmp_path / "pipeline.json", {"pipeline": {"input": ["img"], "output": ["post_output"], "tasks": tasks}})
    facts = read(tmp_path)
    assert facts.task is not None
    assert facts.task.value == "detect"
    assert facts.thresholds is not None
    assert facts.thresholds.value == {"confidence": 0.01}
    assert "320 x 256" in arithmetic(facts)[0]
    assert arithmetic(facts)[1] == "x = x - [123.675, 116.28, 103.53], one per channel"


# Lists of classes


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("data.yaml", "train: a\nnc: 2\nnames: [cat, dog]\n", ("cat", "dog")),
        ("data.yaml", "names:\n  0: cat\n  1: dog\n", ("cat", "dog")),
        ("labels.txt", "cat\ndog\n", ("cat", "dog")),
        ("classes.txt", "plate\n", ("plate",)),
        ("coco.names", "cat\r\ndog\r\n", ("cat", "dog")),
        ("model.names", "cat\ndog", ("cat", "dog")),
        ("classes.json", '{"cat": 0, "dog": 1}', ("cat", "dog")),
        ("tokens.txt", "a\nb\n", ("a", "b")),
        ("labels.json", '{"shapes": []}', None),
        ("classes.txt", "", None),
    ],
)
def test_reads_lists_of_classes(tmp_path: Path, name: str, text: str, expected: Any) -> None:
    write(tmp_path / name, text)
    labels = read(tmp_path).labels
    assert (labels.value if labels is not None else None) == expected


def test_the_number_of_names_must_be_nc(tmp_path: Path) -> None:
    write(tmp_path / "data.yaml", "nc: 3\nnames: [a, b]\n")
    with pytest.raises(DataError, match=r"data\.yaml has 2 names, but nc is 3"):
        read(tmp_path)


def test_a_voice_of_piper_is_a_note(tmp_path: Path) -> None:
    write(tmp_path / "voice.onnx.json", {"audio": {"sample_rate": 22050}, "phoneme_id_map": {"a": [14]}})
    assert "22050 Hz" in read(tmp_path, "voice.onnx").notes[0]


# Any file

NAMES = (
    "config.json", "preprocessor_config.json", "metadata.json", "metadata.yaml", "inference.yml", "infer_cfg.yml",
    "deploy.json", "pipeline.json", "data.yaml", "vocab.json", "tokens.txt", "model.onnx.json", "tokenizer_config.json",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', "a: [", "\0", "x" * 100], ids=range(6))
def test_a_foreign_file_is_ignored(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path / name, content)
    facts = read(tmp_path)
    assert (facts.stated, facts.notes) == ({}, ())


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_a_folder_and_a_device_are_ignored(tmp_path: Path, name: str) -> None:
    for number, prepare in enumerate((Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        prepare(folder / name)
        assert read(folder).stated == {}


MARKED = {
    "config.json": '"architectures"',
    "preprocessor_config.json": '"image_processor_type"',
    "metadata.json": '"image_threshold"',
    "metadata.yaml": "stride:",
    "inference.yml": "transform_ops",
    "infer_cfg.yml": "draw_threshold",
    "deploy.json": '"customs"',
    "pipeline.json": '"transforms"',
    "data.yaml": "names:",
}


@pytest.mark.parametrize("name", MARKED)
def test_a_damaged_file_of_a_writer_is_refused(tmp_path: Path, name: str) -> None:
    deep = '{"a": ' * 100_000 if name.endswith("json") else "[" * 2000
    for content in (f"{{{MARKED[name]} [", f"{{{MARKED[name]}: {deep}", MARKED[name] + " " * (5 << 20)):
        write(tmp_path / name, content)
        with pytest.raises(EdgeqError) as caught:
            read(tmp_path)
        assert str(tmp_path / name) in caught.value.problem
        assert "\n" not in caught.value.problem
        assert len(caught.value.problem) < 400
