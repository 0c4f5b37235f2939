"""Test compiled models in a stand-in for rknnlite, which has the same calls and returns the same values on failure."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgeq_device.bundle.onnxfile import read_context, read_onnx
from edgeq_device.engines import direct_rknn
from edgeq_device.engines.catalog import engines
from edgeq_device.engines.direct_rknn import SIGNATURE, chip_here, open_model
from edgeq_device.errors import BundleError, RuntimeUnavailableError

from edgeq.backends.rknn.context import write_context
from edgeq.signature import Signature, TensorSpec

LITE = """
class RKNNLite:
    NPU_CORE_AUTO = 0
    calls = []
    code = 0
    def load_rknn(self, path):
        with open(path, "rb") as file:
            self.calls.append(file.read())
        return 0
    def init_runtime(self, core_mask=None):
        self.calls.append(core_mask)
        return self.code
    def get_sdk_version(self):
        return "API 2.5.0\\nDRV 0.9.8"
    def inference(self, inputs, data_type=None, data_format=None):
        self.calls.append((data_type, data_format))
        return None if inputs[0].sum() > 1e6 else [inputs[0].reshape(-1)[:5]]
"""
FLOAT = np.dtype(np.float32)
MODEL = Signature((TensorSpec("x", FLOAT, (1, 2, 3, 4)),), (TensorSpec("y", FLOAT, (1, 5)),))
ENGINE = replace(engines()["rknnlite"], module="fake_rknnlite")
GIVEN = {"core_mask": "NPU_CORE_AUTO"}


@pytest.fixture
def lite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "fake_rknnlite").mkdir()
    (tmp_path / "fake_rknnlite" / "__init__.py").write_text("")
    (tmp_path / "fake_rknnlite" / "api.py").write_text(LITE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(direct_rknn, "_COMPATIBLE", tmp_path / "compatible")
    yield tmp_path
    for name in ("fake_rknnlite.api", "fake_rknnlite"):
        sys.modules.pop(name, None)


def context(folder: Path, content: bytes = b"RKNN-compiled") -> Path:
    (folder / "m.rknn").write_bytes(content)
    write_context(folder / "m.rknn", MODEL, "rk3588", "2.5.0", folder / "m.onnx")
    return folder / "m.onnx"


def test_reads_the_compiled_model_back_from_the_context(tmp_path: Path) -> None:
    file = context(tmp_path, bytes(range(256)) * 100)
    assert read_context(file, "m") == bytes(range(256)) * 100
    found = read_onnx(file, "m")
    assert (found.has_context, found.context_outside) == (True, False)
    onnx.checker.check_model(onnx.load(file))
    model = onnx.load(file)
    del model.graph.node[:]
    onnx.save(model, file)
    with pytest.raises(BundleError, match="contains 0 compiled models instead of one"):
        read_context(file, "m")


def test_a_model_runs_on_the_npu_in_floats(lite: Path) -> None:
    (lite / "compatible").write_bytes(b"radxa,rock-5b\0rockchip,rk3588\0")
    session = open_model(None, ENGINE, str(context(lite)), None, GIVEN)
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [("x", "tensor(float)", [1, 2, 3, 4])]
    provider, *known = session.get_providers()
    assert provider == "RknnExecutionProvider"
    assert known == ["cores NPU_CORE_AUTO", "runtime API 2.5.0 DRV 0.9.8", "compiler 2.5.0"]
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    (found,) = session.run(["y"], {"x": x})
    assert found.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]
    from fake_rknnlite.api import RKNNLite  # type: ignore[import-not-found]

    assert RKNNLite.calls == [b"RKNN-compiled", 0, (["float32"], ["nchw"])]


def test_wrong_inputs_are_refused_and_no_answer_is_an_error(lite: Path) -> None:
    session = open_model(None, ENGINE, str(context(lite)), None, GIVEN)
    x = np.zeros((1, 2, 3, 4), np.float32)
    for feed, problem in (
        ({}, "input 'x' is missing"),
        ({"x": x.astype(np.float64)}, "float64"),
        ({"x": x[:, :1]}, r"takes float32 \[1, 2, 3, 4\]"),
        ({"x": x, "z": x}, "takes only x"),
    ):
        with pytest.raises(ValueError, match=problem):
            session.run(None, feed)
    with pytest.raises(RuntimeUnavailableError, match="gives no answer"):
        session.run(None, {"x": x + 1e6})


def test_another_chip_is_refused(lite: Path) -> None:
    (lite / "compatible").write_bytes(b"pine64,quartz64\0rockchip,rk3566\0")
    with pytest.raises(RuntimeUnavailableError, match=r"compiled for rk3588, this board has rk3566"):
        open_model(None, ENGINE, str(context(lite)), None, GIVEN)


def test_a_runtime_that_does_not_start_is_an_error(lite: Path) -> None:
    import fake_rknnlite.api

    fake_rknnlite.api.RKNNLite.code = -1
    with pytest.raises(RuntimeUnavailableError, match=r"fake_rknnlite cannot start m\.onnx: its answer is -1"):
        open_model(None, ENGINE, str(context(lite)), None, GIVEN)


@pytest.mark.parametrize(
    "held",
    [
        None,
        {},
        {"platform": "rk3588"},
        {
            "platform": "rk3588",
            "compiler": "2.5.0",
            "inputs": [{"name": "x", "dtype": "float32", "shape": [1 << 70]}],
            "outputs": [],
        },
        {
            "platform": "rk3588",
            "compiler": "2.5.0",
            "inputs": [{"name": "x", "dtype": "object", "shape": [1]}],
            "outputs": [],
        },
        {
            "platform": "rk3588",
            "compiler": "2.5.0",
            "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
            "outputs": [],
        },
    ],
)
def test_hostile_metadata_are_refused(held: object, lite: Path) -> None:
    file = context(lite)
    model = onnx.load(file)
    del model.metadata_props[:]
    if held is not None:
        entry = model.metadata_props.add()
        entry.key, entry.value = SIGNATURE, json.dumps(held)
    onnx.save(model, file)
    with pytest.raises(BundleError):
        open_model(None, ENGINE, str(file), None, GIVEN)


def test_the_chip_is_the_last_of_the_vendor(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"xunlong,orangepi-5\0rockchip,rk3588s\0")
    assert chip_here(tmp_path / "c") == "rk3588s"
    assert chip_here(tmp_path / "none") == ""
    (tmp_path / "c").write_bytes(b"raspberrypi,5-model-b\0brcm,bcm2712\0")
    assert chip_here(tmp_path / "c") == ""
