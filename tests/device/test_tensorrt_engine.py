from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from edgeq_device.errors import OutputError
from edgeq_device.gpu import Gpu
from edgeq_device.tensorrt_engine import engine_key, plan_engine, trtexec_line, typed_options
from edgeq_device.variants import Variant

from .fakes import variant

OPTIONS = {"trt_fp16_enable": "1", "trt_int8_enable": "1", "trt_engine_cache_enable": "1"}
T4 = Gpu("Tesla T4", (7, 5))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"a model")
    return path


@pytest.fixture
def built(model: Path, tmp_path: Path) -> Variant:
    return variant(
        "t4",
        ep="TensorrtExecutionProvider",
        model=model,
        provider_options=OPTIONS,
        engines=tmp_path / "bundle.engines",
    )


def test_engines_lie_beside_the_bundle_by_gpu_version_and_model(built: Variant, tmp_path: Path) -> None:
    engine = plan_engine(built, [T4], "10.13.0")
    assert engine.folder.parent == tmp_path / "bundle.engines"
    assert engine.folder.name.startswith("tesla-t4-sm75-trt10.13.0-")
    assert engine.options["trt_engine_cache_path"] == str(engine.folder)
    assert not engine.cached
    (engine.folder / "x.engine").write_bytes(b"")
    assert plan_engine(built, [T4], "10.13.0").cached


def test_another_gpu_version_or_model_has_another_engine(built: Variant, model: Path) -> None:
    places = [(T4, "10.13.0"), (T4, "11.0.0"), (Gpu("L4", (8, 9)), "10.13.0")]
    keys = {engine_key(built, gpu, version) for gpu, version in places}
    model.write_bytes(b"another model")
    keys.add(engine_key(built, T4, "10.13.0"))
    assert len(keys) == 4


def test_precision_flags_are_for_weakly_typed_tensorrt(built: Variant) -> None:
    assert typed_options(built, "10.13.0") == OPTIONS
    assert typed_options(built, "11.0.0") == {"trt_engine_cache_enable": "1"}


def test_a_table_is_laid_among_the_engines(built: Variant, tmp_path: Path) -> None:
    table = tmp_path / "t4.calibration.flatbuffers"
    table.write_bytes(b"table")
    with_table = replace(built, info={"table": "calibration.flatbuffers"}, table=table)
    engine = plan_engine(with_table, [T4], "8.6.1")
    laid = engine.folder / "calibration.flatbuffers"
    assert laid.read_bytes() == b"table"
    plan_engine(with_table, [T4], "8.6.1")
    laid.write_bytes(b"mine")
    with pytest.raises(OutputError, match="no calibration table"):
        plan_engine(with_table, [T4], "8.6.1")
    laid.unlink()
    (tmp_path / "mine").write_bytes(b"mine")
    laid.symlink_to(tmp_path / "mine")
    with pytest.raises(OutputError, match="no calibration table"):
        plan_engine(with_table, [T4], "8.6.1")
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_a_folder_that_cannot_be_written_is_replaced_with_a_word(
    built: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine = plan_engine(replace(built, engines=blocked), [T4], "10.13.0")
    assert engine.folder.is_relative_to(tmp_path / "cache")
    assert engine.note == f"engines are kept in {engine.folder.parent}: {blocked} cannot be written"


@pytest.mark.parametrize(
    ("tensorrt", "info", "words"),
    [
        ("10.13.0", {}, ("--stronglyTyped",)),
        ("11.0.0", {}, ()),
        ("8.6.1", {"table": "calibration.flatbuffers"}, ("--int8", "--fp16", "--calib=calibration.tensorrt")),
    ],
)
def test_the_trtexec_line(built: Variant, tensorrt: str, info: dict[str, str], words: tuple[str, ...]) -> None:
    line = trtexec_line(replace(built, info=info), tensorrt, {"x": (1, 3, 8, 8)}).split()
    assert line[0] == "trtexec"
    assert f"--onnx={built.model}" in line
    assert "--shapes=x:1x3x8x8" in line
    flags = {"--stronglyTyped", "--int8", "--fp16", "--calib=calibration.tensorrt"}
    assert flags & set(line) == set(words)
