"""Bundles are written with the same bytes every time, whole or not at all, and with everything that the specification
demands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.bundle.plan import BundleSpec, SelfTestCase, SelfTestSpec, VariantSpec
from edgeq.bundle.verify import opened
from edgeq.bundle.write import write_bundle
from edgeq.errors import BundleError, CalibrationError, DataError, ModelError, OutputError, UsageError

from .samples import INPUT, answer, linear, small_spec, tree, variant


def test_the_same_input_gives_the_same_bytes(spec: BundleSpec, good: Path, good_zip: Path, tmp_path: Path) -> None:
    again = small_spec(tmp_path / "other models")
    write_bundle(again, tmp_path / "x")
    write_bundle(again, tmp_path / "y.edgeq")
    assert tree(tmp_path / "x") == tree(good)
    assert (tmp_path / "y.edgeq").read_bytes() == good_zip.read_bytes()


def test_the_zip_holds_the_directory(good: Path, good_zip: Path) -> None:
    with zipfile.ZipFile(good_zip) as archive:
        assert archive.namelist() == sorted(archive.namelist())
        assert {name: archive.read(name) for name in archive.namelist()} == tree(good)
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_every_file_is_in_the_manifest(good: Path) -> None:
    manifest = json.loads((good / "manifest.json").read_bytes())
    records = manifest["additional_metadata"]["edgeq"]["files"]
    files = tree(good)
    del files["manifest.json"]
    assert records == {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in files.items()
    }
    for name in ("edgeq_run.py", "edgeq_device.zip", "calibration.zip", "selftest.npz"):
        assert name in records
    assert manifest["additional_metadata"]["edgeq"]["source"] == {"sha256": "0" * 64}
    assert manifest["additional_metadata"]["edgeq"]["tools"]["edgeq"]


def test_extra_files_are_hashed_like_all_others(spec: BundleSpec, tmp_path: Path) -> None:
    write_bundle(dataclasses.replace(spec, extras={"report.html": b"<!doctype html>"}), tmp_path / "bundle")
    with opened(tmp_path / "bundle") as bundle:
        assert bundle.files["report.html"].sha256 == hashlib.sha256(b"<!doctype html>").hexdigest()
    (tmp_path / "bundle" / "report.html").write_bytes(b"<!doctype HTML>")
    with pytest.raises(BundleError, match=r"report\.html"), opened(tmp_path / "bundle"):
        raise AssertionError("a changed file must not open")


@pytest.mark.parametrize("name", ["manifest.json", "Models", "edgeq_run.py", "../x", "a/b", ""])
def test_an_extra_file_takes_no_other_place(spec: BundleSpec, name: str) -> None:
    with pytest.raises(UsageError, match="extra file"):
        dataclasses.replace(spec, extras={name: b""})


def test_self_test_vectors_are_there_once(good: Path) -> None:
    with np.load(good / "selftest.npz") as vectors:
        assert sorted(vectors) == ["inputs-0/x", "outputs-0/y", "outputs-1/y"]


def test_external_data_travels(tmp_path: Path) -> None:
    model = linear(tmp_path / "m" / "m.onnx", 0.0, external="weights.bin")
    write_bundle(BundleSpec("x", (variant("a", model, 0.0),)), tmp_path / "b")
    assert (tmp_path / "b" / "models" / "model" / "a" / "weights.bin").is_file()


def test_variants_that_share_weights_take_little_more_than_one(tmp_path: Path) -> None:
    weights = np.random.default_rng(3).standard_normal((48, 48)).astype(np.float32)
    models = [linear(tmp_path / str(i) / "m.onnx", float(i), external="w.bin", weights=weights) for i in range(5)]
    write_bundle(BundleSpec("x", tuple(VariantSpec(f"v{i}", m) for i, m in enumerate(models))), tmp_path / "b")
    files = tree(tmp_path / "b")
    stored = sum(len(data) for name, data in files.items() if name.endswith((".onnx", ".bin")))
    separate = sum(p.stat().st_size for i in range(5) for p in (tmp_path / str(i)).iterdir())
    assert stored < 0.6 * separate


def test_nothing_is_replaced_without_force(spec: BundleSpec, tmp_path: Path) -> None:
    for name in ("b", "b.edgeq"):
        place = tmp_path / name
        write_bundle(spec, place)
        before = tree(tmp_path)
        with pytest.raises(OutputError, match="exists already"):
            write_bundle(spec, place)
        assert tree(tmp_path) == before
        write_bundle(spec, place, force=True)
        assert tree(tmp_path) == before


def test_a_failure_leaves_what_was_there(spec: BundleSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "b.edgeq"):
        write_bundle(spec, tmp_path / name)
    before = tree(tmp_path)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copyfile", interrupted)
    monkeypatch.setattr("shutil.copyfileobj", interrupted)
    for name in ("b", "b.edgeq", "new", "new.edgeq"):
        with pytest.raises(KeyboardInterrupt):
            write_bundle(spec, tmp_path / name, force=True)
    assert tree(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "b.edgeq"]


def test_float32_comes_once_for_each_kind_of_place(tmp_path: Path) -> None:
    model = linear(tmp_path / "m.onnx", 0.0)
    places = [("CPUExecutionProvider", "cpu"), ("CUDAExecutionProvider", "gpu")]
    variants = tuple(VariantSpec(device, model, ep, device) for ep, device in places)
    write_bundle(BundleSpec("x", variants, float_model=model), tmp_path / "b")
    with opened(tmp_path / "b") as bundle:
        assert [(v.name, v.ep) for v in bundle.components["float32"]] == [
            ("float32-cpu", "CPUExecutionProvider"),
            ("float32-gpu", "CUDAExecutionProvider"),
        ]
    assert len(list((tmp_path / "b").rglob("model.onnx"))) == 1


def test_refuses_content_that_a_bundle_cannot_hold(spec: BundleSpec, tmp_path: Path) -> None:
    def refused(error: type[Exception], says: str, **changes: Any) -> None:
        with pytest.raises(error, match=says):
            write_bundle(dataclasses.replace(spec, **changes), tmp_path / "b")
        assert not (tmp_path / "b").exists()

    bare = (dataclasses.replace(spec.variants[0], calibration=tmp_path),)
    refused(CalibrationError, r"has no calibration\.cache", variants=bare)
    refused(BundleError, "metadata cannot be written as JSON", metadata={"accuracy": float("nan")})
    refused(BundleError, "metadata cannot be written as JSON", metadata={"path": tmp_path})
    refused(ModelError, "nothing.onnx", float_model=tmp_path / "nothing.onnx")
    bad = np.full_like(INPUT, np.inf)
    one = spec.variants[0]
    for x, problem in ((bad, "'x' is not finite"), (INPUT.astype(object), "which cannot be compared")):
        test = SelfTestSpec((SelfTestCase({"x": x}, {"y": answer(0.0)}),), {"y": 1e-4})
        refused(DataError, problem, variants=(dataclasses.replace(one, selftest=test),))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "../up"}, "cannot name a variant"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"info": {"selftest": {}}}, "which the bundle writes itself"),
        ({"session_options": {"session.enable_profiling": "1"}}, "is not one that a bundle may set"),
        ({"session_options": {"a": 1}}, "must be strings"),
        ({"info": {"selftest_slices": {}}}, "which the bundle writes itself"),
    ],
)
def test_a_variant_that_makes_no_sense(changes: dict[str, Any], says: str) -> None:
    good = variant("a", Path("m.onnx"), 0.0)
    with pytest.raises(UsageError, match=says):
        dataclasses.replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tolerance": {}}, "differ in 'y'"),
        ({"tolerance": {"y": 1.0, "z": 1.0}}, "differ in 'z'"),
        ({"slices": {"z": ()}}, "has no output 'z'"),
    ],
)
def test_a_self_test_that_makes_no_sense(changes: dict[str, Any], says: str) -> None:
    good = variant("a", Path("m.onnx"), 0.0)
    with pytest.raises(UsageError, match=says):
        dataclasses.replace(good, selftest=dataclasses.replace(good.selftest, **changes))


def test_a_bundle_that_makes_no_sense() -> None:
    one, two = VariantSpec("a", Path("m.onnx")), VariantSpec("A", Path("m.onnx"))
    with pytest.raises(UsageError, match="no variant"):
        BundleSpec("x", ())
    with pytest.raises(UsageError, match="two variants are named"):
        BundleSpec("x", (one, two))
    with pytest.raises(UsageError, match="which the bundle writes itself"):
        BundleSpec("x", (one,), metadata={"files": {}})
