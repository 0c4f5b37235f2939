from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from edgeq_device.engines.tensorrt import format_version, read_linked_version, read_tensorrt


def onnxruntime(folder: Path, library: bytes | None) -> Any:
    (folder / "capi").mkdir()
    if library is not None:
        (folder / "capi" / "libonnxruntime_providers_tensorrt.so").write_bytes(library)
    return SimpleNamespace(__file__=str(folder / "__init__.py"), __version__="1.31.1")


def missing(name: str) -> Any:
    raise OSError(name)


def test_the_version_that_the_provider_is_linked_against(tmp_path: Path) -> None:
    assert read_linked_version(onnxruntime(tmp_path, b"\x7fELF\0libnvinfer.so.10\0libnvinfer_plugin.so.10\0")) == 10


def test_its_library_tells_the_version(tmp_path: Path) -> None:
    loaded: list[str] = []

    def load(name: str) -> Any:
        loaded.append(name)
        return SimpleNamespace(getInferLibVersion=lambda: 101300)

    assert read_tensorrt(onnxruntime(tmp_path, b"libnvinfer.so.10"), load) == ("10.13.0", "")
    assert loaded == ["libnvinfer.so.10"]


def test_a_provider_without_its_library(tmp_path: Path) -> None:
    version, problem = read_tensorrt(onnxruntime(tmp_path, b"libnvinfer.so.11"), missing)
    assert version == ""
    assert problem == "TensorRT 11 is not installed: onnxruntime 1.31.1 needs libnvinfer.so.11"


def test_an_onnxruntime_without_the_provider(tmp_path: Path) -> None:
    ort = onnxruntime(tmp_path, None)
    assert read_tensorrt(ort, missing) == ("", "onnxruntime 1.31.1 here has no TensorrtExecutionProvider")


@pytest.mark.parametrize(("number", "text"), [(8601, "8.6.1"), (100001, "10.0.1"), (110400, "11.4.0")])
def test_version_numbers(number: int, text: str) -> None:
    assert format_version(number) == text
