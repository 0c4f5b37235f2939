"""JavaScript decodes outputs to the same answers as Python, and prepares pictures to the same bytes and frames."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.answers.decode import decode
from edgeq_device.answers.family import all_families
from edgeq_device.answers.head import Head
from edgeq_device.prepare import steps
from edgeq_device.prepare.frame import Frame

from edgeq.backends.web.folder import write_module
from edgeq.backends.web.preprocessing import web_recipe
from edgeq.data.preprocess import load_preprocess
from edgeq.signature import TensorSpec
from edgeq.util.folders import shipped
from edgeq.util.records import plain

from .runtime import in_node

WEB = shipped("targets") / "web"
SIZE = (64, 48)
FRAMES = {
    "letterbox": Frame.of(101, 57).resized(64, 36).placed(0, 6, SIZE),
    "stretched": Frame.of(37, 90).resized(*SIZE),
    "cropped": Frame.of(70, 70).resized(75, 75).placed(-5, -13, SIZE),
}
CELLS = 8 * 6 + 4 * 3 + 2 * 1
READ = """
    import fs from "node:fs";
    const cases = JSON.parse(fs.readFileSync(process.argv[2], "utf-8"));
    const tensor = ({ hex, shape }) => {
      const { buffer } = Uint8Array.from(Buffer.from(hex, "hex"));
      return { type: "float32", shape, data: new Float32Array(buffer) };
    };
"""
DECODE = (
    READ
    + """
    const { decode, toJson } = await import(process.argv[1]);
    console.log(JSON.stringify(cases.map(({ outputs, head, frame }) => {
      const tensors = Object.fromEntries(Object.entries(outputs).map(([name, one]) => [name, tensor(one)]));
      const found = decode(tensors, head, frame);
      return { ...found, masks: found.masks?.map((mask) => [...mask].join("")) ?? null, json: toJson(found) };
    })));
"""
)
PREPARE = (
    READ
    + """
    const { prepareImage } = await import(process.argv[1]);
    const { prepare } = await import(process.argv[3]);
    console.log(JSON.stringify(cases.map(({ recipe, width, height, hex }) => {
      const picture = { width, height, data: Uint8Array.from(Buffer.from(hex, "hex")) };
      const { item, frame } = prepareImage(recipe, picture);
      const { x } = prepare({ manifest: { preprocessing: recipe } }, item);
      return { shape: x.shape, hex: Buffer.from(x.data.buffer).toString("hex"), frame };
    })));
"""
)


@pytest.fixture(autouse=True)
def node() -> None:
    if shutil.which("node") is None:
        pytest.skip("no node here")


def _boxes(random: np.random.Generator, count: int) -> Any:
    """Return centres and sizes in pixels. Objects come in groups, so that suppression has work."""
    groups = random.uniform(0, 1, (6, 4)) * [*SIZE, 40, 30] + [0, 0, 2, 2]
    return groups[random.integers(0, 6, count)] + random.normal(0, 2, (count, 4)).clip(-1.5, 4)


def _scores(random: np.random.Generator, *shape: int) -> Any:
    return random.beta(0.4, 1.2, shape)


def _yolov8(random: np.random.Generator) -> Any:
    rows = np.concatenate([_boxes(random, CELLS), _scores(random, CELLS, 3)], axis=1)
    rows[5] = np.nan
    rows[7, 2] = np.inf
    return {"rows": rows.T[None]}, {"unit": "pixel"}


def _yolov5(random: np.random.Generator) -> Any:
    return {"rows": np.concatenate([_boxes(random, CELLS), _scores(random, CELLS, 4) ** 0.3], axis=1)[None]}, {}


def _yolox(random: np.random.Generator) -> Any:
    boxes = np.concatenate([random.uniform(0, 1, (CELLS, 2)), random.normal(0.5, 0.5, (CELLS, 2))], axis=1)
    boxes[3, 3] = 900
    return {"rows": np.concatenate([boxes, _scores(random, CELLS, 4) ** 0.3], axis=1)[None]}, {}


def _detections(random: np.random.Generator) -> Any:
    boxes = _boxes(random, 20)
    corners = np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=1)
    tail = np.stack([_scores(random, 20), random.integers(-1, 3, 20)], axis=1)
    return {"rows": np.concatenate([corners / [*SIZE, *SIZE], tail], axis=1)[None]}, {"unit": "share"}


def _yolo_seg(random: np.random.Generator) -> Any:
    rows = np.concatenate([_boxes(random, CELLS), _scores(random, CELLS, 2), random.normal(0, 1, (CELLS, 4))], axis=1)
    layout = bool(random.integers(0, 2))
    prototypes = random.normal(0, 1, (1, 12, 16, 4) if layout else (1, 4, 12, 16))
    return {"rows": rows.T[None], "prototypes": prototypes}, {"unit": "pixel", **({"layout": "NHWC"} if layout else {})}


def _yolo_pose(random: np.random.Generator) -> Any:
    values = int(random.integers(2, 4))
    points = random.uniform(0, 48, (CELLS, 5, 3))
    points[..., 2] /= 48
    points = points[..., :values].reshape(CELLS, -1)
    rows = np.concatenate([_boxes(random, CELLS), _scores(random, CELLS, 1), points], axis=1)
    return {"rows": rows.T[None]}, {"keypoints": 5, "values": values}


def _classify(random: np.random.Generator) -> Any:
    return {"scores": random.normal(0, 3, (1, 9, 1, 1))}, {"scores": "logits", "offset": 1}


def _ctc(random: np.random.Generator) -> Any:
    rows = random.normal(0, 3, (1, 24, 9)).repeat(2, axis=1)
    if random.random() < 0.5:
        return {"steps": rows}, {"layout": "TC", "blank": 0}
    return {"steps": rows.transpose(0, 2, 1)}, {"layout": "CT", "blank": "last"}


CASES = {
    "yolov8": (_yolov8, ("cat", "dog", "<b>")),
    "yolov5": (_yolov5, ("cat", "dog")),
    "yolox": (_yolox, ()),
    "detections": (_detections, ("cat", "dog", "cow")),
    "yolo-seg": (_yolo_seg, ("cat", "dog")),
    "yolo-pose": (_yolo_pose, ("person",)),
    "classify": (_classify, tuple("abcdefgh")),
    "ctc": (_ctc, tuple("abcdefg")),
}


def _in_hex(array: Any) -> dict[str, Any]:
    return {"hex": array.astype("<f4").tobytes().hex(), "shape": list(array.shape)}


def _compare(want: Any, got: Any) -> None:
    """Compare JSON values: numbers up to rounding, everything else exactly."""
    if isinstance(want, Mapping):
        assert list(want) == list(got)
        for key in want:
            _compare(want[key], got[key])
    elif isinstance(want, list):
        assert len(want) == len(got)
        for one, other in zip(want, got, strict=True):
            _compare(one, other)
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=2e-5, abs=1e-4)
    else:
        assert want == got


@pytest.mark.parametrize("family", CASES)
def test_javascript_decodes_to_the_answers_of_python(family: str, tmp_path: Path) -> None:
    families = {entry.name: entry for entry in all_families()}
    if family not in families:
        pytest.skip(f"no decoder of {family} in Python")
    generate, labels = CASES[family]
    cases, answers = [], []
    for seed in range(12):
        outputs, parameters = generate(np.random.default_rng(seed))
        outputs = {role: np.asarray(array, np.float32) for role, array in outputs.items()}
        frame = list(FRAMES.values())[seed % 3]
        head = Head(family, {role: role for role in outputs}, parameters, families[family].thresholds, labels)
        answers.append(decode(outputs, head, frame))
        record = {**head.to_dict(), "labels": list(labels)}
        arrays = {name: _in_hex(array) for name, array in outputs.items()}
        cases.append({"outputs": arrays, "head": record, "frame": asdict(frame)})
    (tmp_path / "cases.json").write_text(json.dumps(cases), "utf-8")
    found = in_node(DECODE, (WEB / "decode.mjs").as_uri(), str(tmp_path / "cases.json"))
    assert any(len(answer) or answer.top or answer.text for answer in answers)
    for want, got in zip(answers, found, strict=True):
        assert got["classes"] == want.classes.tolist()
        np.testing.assert_allclose(np.reshape(got["boxes"], (-1, 4)), want.boxes, rtol=0, atol=1e-4)
        np.testing.assert_allclose(got["scores"], want.scores, rtol=1e-6)
        assert got["text"] == want.text
        if want.masks is not None and len(want):
            masks = np.array([[digit == "1" for digit in mask] for mask in got["masks"]]).reshape(want.masks.shape)
            assert (masks == want.masks).mean() >= 0.9999
        if want.keypoints is not None and len(want):
            np.testing.assert_allclose(got["keypoints"], want.keypoints, rtol=0, atol=1e-4)
        _compare(want.to_json(), got["json"])


def test_javascript_has_the_usual_thresholds_of_python() -> None:
    script = "const { FAMILIES } = await import(process.argv[1]); console.log(JSON.stringify(FAMILIES));"
    found = in_node(script, (WEB / "decode.mjs").as_uri())
    for family in all_families():
        if family.name in found:
            assert found[family.name]["thresholds"] == dict(family.thresholds)
            assert found[family.name]["task"] == family.task


@pytest.mark.parametrize(
    "head", [None, {"family": "nanodet"}, {"family": "constructor"}, {"family": "yolov8", "parameters": {"frame": "x"}}]
)
def test_says_why_a_head_is_not_decoded(head: Any) -> None:
    script = """
        const { decode, whyNot } = await import(process.argv[1]);
        const head = JSON.parse(process.argv[2]);
        let refused = "";
        try { decode({}, head); } catch (error) { refused = error.message; }
        console.log(JSON.stringify([whyNot(head), refused]));
    """
    reason, refused = in_node(script, (WEB / "decode.mjs").as_uri(), json.dumps(head))
    assert reason
    assert refused.endswith(reason)


RECIPES = [
    *("yolo", "yolox", "imagenet", "tf-crop", "unit-bgr"),
    "letterbox=40x24:center:[1,2,3]:lanczos:round,layout=NCHW",
    "resize=21:long:hamming:ceil,layout=NCHW",
    "channels=L,resize=30x20:exact:bicubic,divide=255,layout=NCHW",
    "resize=40x30:fit:box:round,layout=NCHW",
    "resize=17x33:exact:nearest,crop=9x11:round,resize=20x20,crop=15x13:ceil,layout=NCHW",
]


def test_pictures_become_the_bytes_and_frames_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL", reason="no Pillow here")
    resize = steps._resize

    def resize_rows_then_columns(pixels: Any, size: tuple[int, int], name: str) -> Any:
        # Pillow 13 resizes columns first where it expects less work, and then rounds some values differently.
        return resize(resize(pixels, (size[0], pixels.shape[0]), name), size, name)

    monkeypatch.setattr(steps, "_resize", resize_rows_then_columns)
    random, cases, prepared = np.random.default_rng(0), [], []
    for text in RECIPES:
        channels = 1 if "channels=L" in text else 3
        for width, height in ((71, 40), (31, 53)):
            spec = TensorSpec("x", np.dtype(np.float32), (1, channels, 64, 64))
            preprocess = load_preprocess(text)
            image = random.integers(0, 256, (height, width, 4), np.uint8)
            array, frame = steps.Prepare(plain(preprocess), spec.shape).prepare(image[:, :, :3])
            recipe = web_recipe(preprocess, spec)
            cases.append({"recipe": recipe, "width": width, "height": height, "hex": image.tobytes().hex()})
            prepared.append((array.astype(np.float32), frame))
    (tmp_path / "cases.json").write_text(json.dumps(cases), "utf-8")
    module = write_module(tmp_path)
    for file in WEB.glob("*.mjs"):
        shutil.copyfile(file, tmp_path / file.name)
    found = in_node(PREPARE, (tmp_path / "answer.mjs").as_uri(), str(tmp_path / "cases.json"), module.as_uri())
    names = [text for text in RECIPES for _ in range(2)]
    for (array, frame), got, text in zip(prepared, found, names, strict=True):
        assert got["shape"] == list(array.shape), text
        assert bytes.fromhex(got["hex"]) == array.tobytes(), text
        for name, value in asdict(frame).items():
            assert got["frame"][name] == pytest.approx(value), text
