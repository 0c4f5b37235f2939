"""Test run.py of the image classification example: its command line and its output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from edgeq.compat.run import command
from tests.compat.models import SIZE, batch, classifier


@pytest.fixture
def test_images(tmp_path: Path) -> Path:
    folder = tmp_path / "test_images"
    folder.mkdir()
    for index in range(4):
        pixels = np.random.default_rng(index).integers(0, 256, (SIZE + 4, SIZE, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.jpg")
    return folder


def run(model: Path, output: Path, *more: object) -> Result:
    arguments = ["--input_model", model, "--output_model", output, *more]
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_the_documented_command_line(tmp_path: Path, test_images: Path) -> None:
    model, output = classifier(tmp_path / "mobilenetv2-7-infer.onnx"), tmp_path / "mobilenetv2-7.quant.onnx"
    result = run(model, output, "--calibrate_dataset", f"{test_images}/")
    assert result.exit_code == 0, result.output
    onnx.checker.check_model(output)
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(output).graph.node}
    assert onnxruntime.InferenceSession(output).run(None, {"x": batch()})[0].shape == (2, 4)
    assert "Calibrated and quantized model saved" in result.output
    assert "float32: " in result.output
    assert "int8: " in result.output


@pytest.mark.parametrize(("written", "form", "axes"), [("True", "QDQ", 1), ("False", "QOperator", 0)])
def test_per_channel_can_be_false(tmp_path: Path, test_images: Path, written: str, form: str, axes: int) -> None:
    """The word "False" turns per-channel off. The example read any text as true."""
    model, output = classifier(tmp_path / "m.onnx"), tmp_path / "q.onnx"
    result = run(model, output, "--calibrate_dataset", test_images, "--per_channel", written, "--quant_format", form)
    assert result.exit_code == 0, result.output
    graph = onnx.load(output).graph
    assert [len(t.dims) for t in graph.initializer if t.name.endswith("w_scale")] == [axes]
    assert ("QLinearConv" in {node.op_type for node in graph.node}) is (form == "QOperator")


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    model, output = classifier(tmp_path / "m.onnx"), tmp_path / "q.onnx"
    result = run(model, output, "--calibrate_dataset", tmp_path / "nowhere")
    assert result.exit_code == 4
    assert "Traceback" not in result.output
    assert not output.exists()
