"""Test the steps around a GPU session, with sessions that run on the CPU under a GPU provider's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from edgeq_device.engines import cuda, tensorrt
from edgeq_device.engines.tensorrt import open_on_gpu
from edgeq_device.engines.variant import Variant
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.system.gpus import Gpu

from .fakes import case, variant

TENSORRT = "TensorrtExecutionProvider"


class Pretender:
    """Run on the CPU and report TensorRT as the provider."""

    def __init__(self, model: Path, providers: list[Any]) -> None:
        self.asked = providers
        self._session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])

    def get_providers(self) -> list[str]:
        return [entry[0] if isinstance(entry, tuple) else entry for entry in self.asked]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class Ort:
    """Imitate onnxruntime, with the CPU's memory in place of the GPU's."""

    __version__ = "9.9"
    __file__ = "nowhere"

    class OrtValue:
        @staticmethod
        def ortvalue_from_numpy(array: Any, device: str, index: int) -> Any:
            return onnxruntime.OrtValue.ortvalue_from_numpy(array, "cpu", 0)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a T4 with TensorRT 10. Outputs of open size are bound on the CPU."""
    monkeypatch.setattr(tensorrt, "read_gpus", lambda: ((Gpu("Tesla T4", (7, 5)),), ""))
    monkeypatch.setattr(tensorrt, "read_tensorrt", lambda ort: ("10.13.0", ""))

    class OnCpu(cuda.BoundSession):
        def __init__(self, session: Any, ort: Any, device: str, notes: Any = ()) -> None:
            super().__init__(session, ort, "cpu", notes)

    monkeypatch.setattr(cuda, "BoundSession", OnCpu)


@pytest.fixture
def for_tensorrt(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Variant:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    x = np.ones((1, 64), np.float32)
    return variant(
        "t4",
        ep=TENSORRT,
        model=models["narrow"],
        provider_options={"trt_int8_enable": "1"},
        cases=(case(tmp_path, x, x),),
        bundle="ab12",
    )


@pytest.mark.usefixtures("on_a_gpu")
def test_an_engine_is_announced_timed_and_noted(
    for_tensorrt: Variant, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[Pretender] = []

    def open_with(providers: list[Any]) -> Pretender:
        opened.append(Pretender(models["narrow"], providers))
        return opened[-1]

    session = open_on_gpu(for_tensorrt, Ort, open_with)
    said = capsys.readouterr()
    assert said.out == ""
    assert "building a TensorRT engine for Tesla T4: this takes minutes, once" in said.err
    assert re.search(r"built and kept in .*tesla-t4-sm75-trt10\.13\.0.* this is not part of any latency", said.err)
    first, options = opened[0].asked[0]
    assert opened[0].asked[1] == ("CUDAExecutionProvider", {"use_tf32": "0"})
    assert first == TENSORRT
    assert options["trt_engine_cache_path"].startswith(f"{tmp_path / 'cache'}/edgeq/tensorrt/ab12/")
    assert len(opened) == 1  # no CUDA graph, because the model has open sizes
    assert any("--shapes=x:1x64" in note and "--stronglyTyped" in note for note in session.notes)
    assert session.run(None, {"x": np.ones((1, 64), np.float32)})[0].shape == (1, 8)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_provider_that_onnxruntime_left_out_is_an_error(for_tensorrt: Variant, models: dict[str, Path]) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"lists TensorrtExecutionProvider, but cannot start it"):
        open_on_gpu(for_tensorrt, Ort, lambda providers: Pretender(models["narrow"], ["CPUExecutionProvider"]))


def test_a_missing_tensorrt_is_reported_before_anything_is_opened(
    for_tensorrt: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt, "read_tensorrt", lambda ort: ("", "TensorRT 10 is not installed"))
    with pytest.raises(RuntimeUnavailableError, match="TensorRT 10 is not installed"):
        open_on_gpu(for_tensorrt, Ort, lambda providers: pytest.fail("opened"))
