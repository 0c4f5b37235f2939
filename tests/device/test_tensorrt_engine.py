from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from edgeq_device.engines.tensorrt import build_trtexec_line, name_engine, plan_engine, select_typed_options
from edgeq_device.engines.variant import Variant
from edgeq_device.errors import OutputError
from edgeq_device.system.gpus import Gpu

from .fakes import variant

OPTIONS = {"trt_fp16_enable": "1", "trt_int8_enable": "1", "trt_engine_cache_enable": "1"}
T4 = Gpu("Tesla T4", (7, 5))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"a model")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the user's cache to an empty folder."""
    place = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    return place


@pytest.fixture
def built(model: Path, tmp_path: Path, cache: Path) -> Variant:
    return variant(
        "t4",
        ep="TensorrtExecutionProvider",
        model=model,
        provider_options=OPTIONS,
        bundle="ab12",
        old_engines=tmp_path / "bundle.engines",
    )


def test_engines_lie_in_the_users_cache_by_bundle_gpu_version_and_model(built: Variant, cache: Path) -> None:
    engine = plan_engine(built, [T4], "10.13.0")
    assert engine.folder.parent == cache / "edgeq" / "tensorrt" / "ab12"
    assert engine.folder.name.startswith("tesla-t4-sm75-trt10.13.0-")
    assert engine.options["trt_engine_cache_path"] == str(engine.folder)
    assert {stat.S_IMODE(place.stat().st_mode) for place in (engine.folder, *engine.folder.parents[:3])} == {0o700}
    assert not engine.cached
    (engine.folder / "x.engine").write_bytes(b"")
    assert plan_engine(built, [T4], "10.13.0").cached
    assert not plan_engine(replace(built, bundle="cd34"), [T4], "10.13.0").cached


def test_an_engine_beside_the_bundle_is_not_used_and_a_note_tells_so_once(built: Variant) -> None:
    assert built.old_engines is not None
    key = name_engine(built, T4, "10.13.0")
    for name in (key, key.replace(key.rpartition("-")[2], key.rpartition("-")[2][:16])):
        (built.old_engines / name).mkdir(parents=True)
        (built.old_engines / name / "x.engine").write_bytes(b"hostile")
    engine = plan_engine(built, [T4], "10.13.0")
    assert not engine.cached
    assert not any(str(built.old_engines) in value for value in engine.options.values())
    assert f"{built.old_engines} is not used" in engine.note
    (engine.folder / "x.engine").write_bytes(b"")
    assert plan_engine(built, [T4], "10.13.0").note == ""


@pytest.mark.skipif(os.name != "posix", reason="modes and owners as POSIX has them")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("spoil", ["link", "open", "file"])
def test_a_cache_in_which_others_can_write_is_not_used(built: Variant, cache: Path, level: int, spoil: str) -> None:
    place = plan_engine(built, [T4], "10.13.0").folder
    (place / "x.engine").write_bytes(b"hostile")
    spoilt = [place, *place.parents][level]
    if spoil == "open":
        spoilt.chmod(0o777)
    else:
        spoilt.rename(cache / "elsewhere")
        if spoil == "link":
            spoilt.symlink_to(cache / "elsewhere")
        else:
            spoilt.write_bytes(b"")
    engine = plan_engine(built, [T4], "10.13.0")
    assert not engine.cached
    assert not engine.folder.is_relative_to(cache)
    assert engine.note.startswith("engines are lost after this run: ")


def test_another_gpu_version_or_model_has_another_engine(built: Variant, model: Path) -> None:
    places = [(T4, "10.13.0"), (T4, "11.0.0"), (Gpu("L4", (8, 9)), "10.13.0")]
    keys = {name_engine(built, gpu, version) for gpu, version in places}
    model.write_bytes(b"another model")
    keys.add(name_engine(built, T4, "10.13.0"))
    assert len(keys) == 4


def test_precision_flags_are_for_weakly_typed_tensorrt(built: Variant) -> None:
    assert select_typed_options(built, "10.13.0") == OPTIONS
    assert select_typed_options(built, "11.0.0") == {"trt_engine_cache_enable": "1"}


def test_a_table_is_laid_among_the_engines(built: Variant, tmp_path: Path) -> None:
    table = tmp_path / "t4.calibration.flatbuffers"
    table.write_bytes(b"table")
    with_table = replace(built, info={"table": "calibration.flatbuffers"}, table=table)
    engine = plan_engine(with_table, [T4], "8.6.1")
    laid = engine.folder / "calibration.flatbuffers"
    assert laid.read_bytes() == b"table"
    plan_engine(with_table, [T4], "8.6.1")
    laid.write_bytes(b"mine")
    with pytest.raises(OutputError, match="not one of edgeq's calibration tables"):
        plan_engine(with_table, [T4], "8.6.1")
    laid.unlink()
    (tmp_path / "mine").write_bytes(b"mine")
    laid.symlink_to(tmp_path / "mine")
    with pytest.raises(OutputError, match="not one of edgeq's calibration tables"):
        plan_engine(with_table, [T4], "8.6.1")
    assert (tmp_path / "mine").read_bytes() == b"mine"


@pytest.mark.parametrize("cache_home", ["file", "relative"])
def test_without_a_cache_engines_are_lost_with_a_word(
    built: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_home: str
) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    if cache_home == "relative":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    engine = plan_engine(built, [T4], "10.13.0")
    assert engine.folder.is_dir()
    assert engine.note.startswith("engines are lost after this run: ")


@pytest.mark.parametrize(
    ("tensorrt", "info", "words"),
    [
        ("10.13.0", {}, ("--stronglyTyped",)),
        ("11.0.0", {}, ()),
        ("8.6.1", {"table": "calibration.flatbuffers"}, ("--int8", "--fp16", "--calib=calibration.tensorrt")),
    ],
)
def test_the_trtexec_line(built: Variant, tensorrt: str, info: dict[str, str], words: tuple[str, ...]) -> None:
    line = build_trtexec_line(replace(built, info=info), tensorrt, {"x": (1, 3, 8, 8)}).split()
    assert line[0] == "trtexec"
    assert f"--onnx={built.model}" in line
    assert "--shapes=x:1x3x8x8" in line
    flags = {"--stronglyTyped", "--int8", "--fp16", "--calib=calibration.tensorrt"}
    assert flags & set(line) == set(words)
