from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from edgeq.backends.tensorrt import options
from edgeq.errors import UsageError


def fake_onnxruntime(folder: Path, monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    (folder / "capi").mkdir()
    (folder / "capi" / "libonnxruntime_providers_tensorrt.so").write_bytes(words)
    module = SimpleNamespace(__file__=str(folder / "__init__.py"), __version__="9.9.9")
    monkeypatch.setattr(options, "onnxruntime", lambda: module)


def test_accepts_every_option_that_edgeq_sets() -> None:
    for rest in ("float32", "float16", "bfloat16"):
        options.check_options(options.TENSORRT, options.explicit_options(rest))
    options.check_options(options.TENSORRT, options.table_options("calibration.flatbuffers"))


def test_an_unknown_option_brings_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"trt_fp16_enabled.*Did you mean trt_fp16_enable"):
        options.check_options(options.TENSORRT, {"trt_fp16_enabled": "1"})


def test_the_installed_library_is_read_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_onnxruntime(tmp_path, monkeypatch, b"\0trt_fp16_enable\0trt_brand_new_enable\0device_id\0")
    known, source = options.known_options(options.TENSORRT)
    assert known == {"trt_fp16_enable", "trt_brand_new_enable", "device_id"}
    assert "installed onnxruntime 9.9.9" in source
    with pytest.raises(UsageError, match="has no option 'trt_int8_enable'"):
        options.check_options(options.TENSORRT, options.explicit_options("float16"))


def test_without_one_the_record_counts() -> None:
    known, source = options.known_options(options.CUDA)
    assert "enable_cuda_graph" in known
    assert source
