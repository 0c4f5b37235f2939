"""Test engines that open files of their own format: which models are converted, how often, and which file runs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from edgeq import demo
from edgeq.cli import group
from edgeq.errors import UsageError
from edgeq.model.convert import bytes_of_text
from edgeq.run.engines import load_engines
from edgeq.run.session import EngineFiles, Engines, SessionSettings, choose_file_engine, open_session
from tests.plugins import needs_plugin

LITERT = load_engines()["litert"]
PAIRS = """<ir_version: 8, opset_import: ["": 17]>
pairs (float[N, 3, 7, 5] x) => (float[N, 4, 3, 2] y)
<float fine = {0.03}, TYPE middle = {ZERO}, float small = {0.01}, int8 none = {0}, float coarse = {0.25}> {
    q = QuantizeLinear(x, fine, middle)
    d = DequantizeLinear(q, fine, middle)
    f = DequantizeLinear(w, small, none)
    c = Conv<kernel_shape = [3, 3], strides = [2, 2]>(d, f)
    r = QuantizeLinear(c, coarse, middle)
    y = DequantizeLinear(r, coarse, middle)
}"""


def test_a_file_is_converted_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Path, Any]] = []

    def convert(model: Path, destination: Path, options: Any) -> None:
        made.append((model, options))
        destination.write_bytes(model.read_bytes())

    monkeypatch.setattr("edgeq.run.session.find_converter", lambda engine: convert)
    model, own, folder = tmp_path / "m.onnx", tmp_path / "m.tflite", tmp_path / "made"
    model.write_bytes(b"one")
    folder.mkdir()
    files = EngineFiles(folder)
    first = files.convert_once(model, LITERT)
    assert (first.suffix, first.parent, files.convert_once(model, LITERT)) == (".tflite", folder, first)
    assert (files.convert_once(own, LITERT), files.convert_once(model, None)) == (own, model)
    assert files.convert_once(model, load_engines()["onnxruntime"]) == model
    model.write_bytes(b"two!")
    os.utime(model, ns=(0, 0))
    assert files.convert_once(model, LITERT).read_bytes() == b"two!"
    other = replace(LITERT, options={"other": "1"})
    assert files.convert_once(model, other) != files.convert_once(model, LITERT)
    assert [options for _, options in made] == [LITERT.options, LITERT.options, other.options]


def test_a_file_of_an_engine_names_its_engine() -> None:
    file, plain = Path("m.tflite"), SessionSettings()
    assert choose_file_engine(Path("m.onnx"), plain) == plain
    found = choose_file_engine(file, plain).engine
    assert found is not None
    assert found.name == "litert"
    with pytest.raises(UsageError, match=r"m\.tflite is a \.tflite file, which onnxruntime does not open"):
        choose_file_engine(file, SessionSettings(engine=load_engines()["onnxruntime"]))


@needs_plugin("litert")
@pytest.mark.parametrize(("type_", "zero"), [("int8", "-7"), ("uint8", "121")])
def test_a_quantized_model_answers_as_its_formula_says(type_: str, zero: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = {"w": random.integers(-127, 128, (4, 3, 3, 3)).astype(np.int8)}
    model = tmp_path / "pairs.onnx"
    model.write_bytes(bytes_of_text(PAIRS.replace("TYPE", type_).replace("ZERO", zero), weights))
    x = random.normal(scale=2, size=(3, 3, 7, 5)).astype(np.float32)
    right = open_session(model, SessionSettings(optimization="none")).run(None, {"x": x})[0]
    with Engines() as engines:
        session = engines.open(model, SessionSettings(engine=LITERT))
        assert [(i.name, i.shape) for i in session.get_inputs()] == [("x", ["N", 3, 7, 5])]
        np.testing.assert_allclose(session.run(None, {"x": x})[0], right, atol=1e-6)


@needs_plugin("litert")
def test_the_commands_take_the_engine_and_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> str:
        done = CliRunner().invoke(group, [str(a) for a in arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    data, brief = ("--data", demo.CALIBRATION), ("--duration", 0.02, "--queries", 3)
    run("package", demo.MODEL, *data, "--engine", "litert", "-o", "b", "--count", 20)
    (file,) = Path("b").glob("models/model/*-litert/model.tflite")
    assert "engine    litert" in run("detect")
    for model in (file, "b"):
        assert "dB" in run("eval", model, *data, "--reference", demo.MODEL, "--count", 4)
        run("bench", model, *brief)
    assert "passed" in run("verify", "b")
    refused = CliRunner().invoke(group, ["debug", str(demo.MODEL), str(file), "--data", str(demo.CALIBRATION)])
    assert (refused.exit_code, "a .tflite file: its layers cannot be compared" in refused.stderr) == (2, True)
