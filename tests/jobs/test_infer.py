"""Test `edgeq infer` on models and bundles, which answer as the bundle does on its device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

import edgeq
from tests.cli.workspace import Workspace
from tests.device.detector import bundle, detector
from tests.docs.stand_ins import sources

STEPS = "resize=model,divide=255,layout=NCHW"
LINE = "person 0.90  40 60 120 100"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name in ("a.png", "c.png"):
        Image.new("RGB", (160, 160), (90, 90, 90)).save(tmp_path / "photos" / name)
    (tmp_path / "labels.txt").write_text("cat\nperson\n")
    detector(tmp_path / "net.onnx")
    return Workspace(tmp_path)


def test_a_model_and_its_bundle_give_the_same_lines(workspace: Workspace) -> None:
    bundle(workspace.path)
    options = ("--preprocess", STEPS, "--classes", "labels.txt", "--head", "yolov8")
    for ran in (
        workspace.run("infer", "net.onnx", "photos/a.png", "--threshold", "0.5", *options),
        workspace.run("infer", "dist", "photos/a.png", "--threshold", "0.5"),
    ):
        assert ran.out.splitlines()[0] == LINE


def test_a_model_of_two_images_answers_one(workspace: Workspace) -> None:
    detector(workspace.path / "net.onnx", batch=2)
    ran = workspace.run("infer", "net.onnx", "photos/a.png", "--preprocess", STEPS, "--head", "yolov8")
    assert ran.out.splitlines()[:1] == ["person 0.90  40 60 120 100"], ran.err


def test_facts_of_the_file_need_no_option(workspace: Workspace) -> None:
    names = {"names": "{0: 'cat', 1: 'person'}", "task": "detect", "imgsz": "[8, 8]", "stride": "4"}
    detector(workspace.path / "net.onnx", metadata={**names, "description": "Ultralytics YOLO", "batch": "1"})
    ran = workspace.run("infer", "net.onnx", "photos/a.png", "--json", "--threshold", "0.5")
    assert ran.code == 0, ran.err
    (entry,) = json.loads(ran.out)["inputs"]
    assert entry["objects"][0]["name"] == "person"


def test_a_single_file_answers_with_the_model_s_own_names(tmp_path: Path) -> None:
    """The runner in a zip in a zip finds the head. The class folders of the samples name other classes."""
    source, samples = sources(tmp_path)
    model = onnx.load(source)
    names = {"names": "{0: 'red', 1: 'green', 2: 'blue', 3: 'grey'}", "task": "classify", "imgsz": "[224, 224]"}
    onnx.helper.set_model_props(model, {**names, "description": "Ultralytics YOLO", "stride": "1", "batch": "1"})
    onnx.save(model, source)
    edgeq.package(source, edgeq.Data(samples, "imagenet"), tmp_path / "dist.edgeq", timed=False)
    command = [sys.executable, "dist.edgeq", "infer", "calib/1/picture_1.png"]
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("green "), done.stderr


def test_a_folder_goes_on_after_a_bad_image(workspace: Workspace) -> None:
    (workspace.path / "photos" / "0.png").write_bytes(b"bad")
    options = ("--preprocess", STEPS, "--head", "yolov8", "--draw", "drawn")
    ran = workspace.run("infer", "net.onnx", "photos", *options)
    assert ran.code == 4
    assert "1 of 3 inputs have no answer" in ran.line
    assert ran.out.count("person 0.90  40 60 120 100") == 2
    assert {name for name in ran.after if name.startswith("drawn/")} == {"drawn/a.png", "drawn/c.png"}


def test_tensors_and_raw_outputs(workspace: Workspace) -> None:
    np.save(workspace.path / "x.npy", np.zeros((1, 3, 8, 8), np.float32))
    ran = workspace.run("infer", "net.onnx", "x.npy", "--head", "yolov8")
    assert ran.out.splitlines()[0] == "person 0.90  2 3 6 5"
    raw = workspace.run("infer", "net.onnx", "x.npy", "--raw", "y.npz")
    assert raw.out.splitlines()[0] == "y: float32[1, 6, 10]"
    with np.load(workspace.path / "y.npz") as outputs:
        assert outputs["y"].shape == (1, 6, 10)


@pytest.mark.parametrize(
    ("code", "arguments", "says"),
    [
        (2, ("net.onnx", "photos/a.png", "--preprocess", STEPS, "--head", "nothing"), "unknown head"),
        (2, ("net.onnx", "photos/a.png", "--preprocess", STEPS, "--head", "none"), "nothing says what the outputs"),
        (2, ("net.onnx", "photos/a.png", "--raw", "y.npz", "--threshold", "0.5"), "need answers"),
        (2, ("net.onnx", "photos/a.png", "--draw", "x.gif"), "Write .png or .svg"),
        (6, ("net.onnx", "photos/a.png", "--draw", "photos/a.png", "--force"), "is an input"),
        (6, ("net.onnx", "photos/a.png", "--draw", "net.onnx", "--force"), "input"),
        (2, ("net.onnx", "photos", "--draw", "x.png"), "one file"),
        (4, ("net.onnx", "empty.png"), "empty.png"),
    ],
)
def test_refusals(workspace: Workspace, code: int, arguments: tuple[str, ...], says: str) -> None:
    workspace.refused(code, "infer", *arguments, says=says)


def test_options_of_a_model_are_refused_for_a_bundle(workspace: Workspace) -> None:
    bundle(workspace.path)
    workspace.refused(2, "infer", "dist", "photos/a.png", "--head", "yolov8", says="Leave --head out")
