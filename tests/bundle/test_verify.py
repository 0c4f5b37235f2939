"""Test `edgeq verify`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from edgeq_device.bundle.package import open_bundle
from edgeq_device.bundle.variants import SliceTolerance
from edgeq_device.bundle.verify import variant_lines
from edgeq_device.cli import main
from edgeq_device.errors import BundleError
from edgeq_device.prepare.arrays import read_arrays, write_npz

from edgeq.bundle.plan import BundleSpec
from edgeq.bundle.verify import verify_bundle
from edgeq.bundle.write import write_bundle
from edgeq.cli import group

from .attacks import directories
from .samples import ELSEWHERE, INPUT, linear, variant


def test_report_lists_every_variant(good_zip: Path) -> None:
    report = verify_bundle(good_zip)
    assert report.passed
    assert [(entry.variant.name, entry.status) for entry in report.variants] == [
        ("plain", "passed"),
        ("better", "not run"),
        ("elsewhere", "not run"),
        ("float32", "loaded"),
    ]
    (check,) = report.variants[0].selftest.outputs if report.variants[0].selftest else ()
    assert check.name == "y"
    assert check.max_abs_error <= check.tolerance


def test_a_slice_of_an_output_travels_with_its_tolerance(tmp_path: Path) -> None:
    model = linear(tmp_path / "m.onnx", 0.0)
    part = SliceTolerance(1, 4, 11, 1e-3)
    tested = variant("v", model, 0.0)
    tested = replace(tested, selftest=replace(tested.selftest, slices={"y": (part,)}))
    write_bundle(BundleSpec("x", (tested,)), tmp_path / "b")
    report = verify_bundle(tmp_path / "b")
    assert report.passed
    assert report.variants[0].variant.slices == {"y": (part,)}
    assert set(report.to_dict()["variants"][0]["outputs"]) == {"y", "y, 4..11 on axis 1"}
    assert set(report.variants[0].variant.info["selftest"]) == {"cases", "tolerance"}, "what earlier readers know"


def test_reports_outputs_that_are_not_finite() -> None:
    check = {"max_abs_error": None, "tolerance": 0.1, "passed": False, "problem": "it is not finite"}
    found = {"component": "model", "variant": "pi", "status": "failed", "reason": "", "outputs": {"y": check}}
    assert list(variant_lines(found)) == ["  model/pi: failed", "    y: it is not finite, allowed 0.1: WRONG"]


def test_the_float_model_alone_verifies_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verification fails if only the float model runs here, because that model runs anywhere. `infer` and `bench` also
    refuse such a bundle.
    """
    model = linear(tmp_path / "m.onnx", 0.0)
    elsewhere = variant("pi", model, 0.0, info={"architecture": ELSEWHERE})
    write_bundle(BundleSpec("x", (elsewhere,), float_model=linear(tmp_path / "f.onnx", 0.0)), tmp_path / "b")
    assert main(["verify", "--bundle", str(tmp_path / "b")]) == 7
    assert f"no variant runs on this device (pi: it is for {ELSEWHERE}" in capsys.readouterr().err
    done = CliRunner().invoke(group, ["verify", str(tmp_path / "b"), "--json"])
    assert (done.exit_code, json.loads(done.stdout)["passed"]) == (7, False)
    assert main(["verify", "--bundle", str(tmp_path / "b"), "--variant", "float32"]) == 0


def test_command(good: Path) -> None:
    done = CliRunner().invoke(group, ["verify", str(good), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["passed"] is True
    assert set(found) == {
        "bundle",
        "name",
        "manifest_sha256",
        "files",
        "bytes",
        "extra_files",
        "opened",
        "signed",
        "signer",
        "architecture",
        "onnxruntime",
        "passed",
        "variants",
    }
    human = CliRunner().invoke(group, ["verify", str(good)])
    assert "all hashes right" in human.stdout
    assert "it is for" in human.stdout


def test_the_hash_is_printed_and_compared(good: Path, good_zip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_bundle(good) as bundle:
        digest = bundle.manifest_sha256
    for place in (str(good), str(good_zip)):
        for expected, code, says in (
            (digest, 0, f"manifest sha256 {digest}"),
            (digest.upper(), 0, "all hashes right"),
            ("0" * 64, 7, f"its manifest has the sha256 {digest}, not {'0' * 64}"),
            (digest[:-1], 2, "is not a sha256. Give 64 hexadecimal digits"),
            (f" {digest}", 2, "is not a sha256"),
        ):
            done = CliRunner().invoke(group, ["verify", place, "--expect", expected])
            assert done.exit_code == code, done.output
            assert says in done.output
            assert main(["verify", "--bundle", place, "--expect", expected]) == code
            printed = capsys.readouterr()
            assert says in printed.out + printed.err
    for_targets = ["verify", str(good), "--on", "all", "--expect", "0" * 64]
    assert CliRunner().invoke(group, for_targets).exit_code == 7


@pytest.mark.parametrize(
    ("outputs", "says"), [({}, "has no group"), ({"y": np.zeros((0, 48), np.float32)}, "compares nothing")]
)
def test_a_self_test_that_compares_nothing_has_not_passed(outputs: dict[str, Any], says: str, copy: Path) -> None:
    write_npz(copy / "selftest.npz", {"inputs-0/x": INPUT, **{f"outputs-0/{name}": a for name, a in outputs.items()}})
    directories.seal(copy)
    done = CliRunner().invoke(group, ["verify", str(copy), "--variant", "plain"])
    assert done.exit_code == 10, done.output
    assert says in done.output
    assert "passed" not in done.output


def test_the_target_of_a_bundle_is_a_name(copy: Path, tmp_path: Path) -> None:
    """A bundle's target is never the path of a file that edgeq then reads."""
    own = tmp_path / "own.toml"
    own.write_text("not TOML at all")
    for name in (str(own), "own.toml", "../own.toml"):
        directories.edit_info(copy, target=name, profile="x86-64-v3")
        done = CliRunner().invoke(group, ["verify", str(copy), "--variant", "plain", "--on", "all"])
        assert done.exit_code == 5, done.output
        assert "but neither is known here" in done.output


def test_records_of_packagers_may_have_keys_of_their_own(copy: Path) -> None:
    """Packagers may add keys where docs/reference/bundle.md allows it. Elsewhere, an unknown key is an attack."""

    def add_records(variant: dict[str, Any]) -> None:
        variant["executor_info"]["other"] = variant["additional_metadata"] = {"x": 1}

    directories.edit_variant(copy, add_records)
    directories.edit_info(copy, unheard_of=1)
    directories.edit(copy, "manifest.json", lambda m: m["additional_metadata"].update(other={"x": 1}))
    assert verify_bundle(copy).passed


HOSTILE = "\x1b]0;mine\x07\nlinear: verified\x9b2J\u202e"


def test_prints_texts_of_bundles_escaped(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories.edit_info(copy, products=[HOSTILE])
    directories.seal(copy, package_name=HOSTILE, description=HOSTILE)
    arguments = (["info"], ["verify"], ["info", "--json"], ["verify", "--json"], ["infer", "x.npy", "-o", "o.npz"])
    for command in arguments:
        main([*command, "--bundle", str(copy)])
    for command in (["verify", str(copy)], ["verify", str(copy), "--json"]):
        done = CliRunner().invoke(group, command)
        assert done.output.replace("\n", "").isprintable()
    printed = capsys.readouterr()
    assert "mine" in printed.out
    for text in (printed.out, printed.err):
        assert text.replace("\n", "").isprintable()
        assert not any(line.startswith("linear: verified") for line in text.splitlines())


@pytest.mark.parametrize("changed", [{"required_features": [HOSTILE]}, {"architecture": HOSTILE}])
def test_features_and_architectures_are_names(
    copy: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, object]
) -> None:
    directories.edit_info(copy, **changed)
    assert main(["info", "--bundle", str(copy)]) == 7
    assert next(iter(changed)) in capsys.readouterr().err


def test_a_bundle_that_was_used_is_whole(copy: Path) -> None:
    """People's outputs and notes at the top of a bundle are named. Files that could be loaded are refused."""
    for name in ("out.npz", "info.txt", ".DS_Store", "report"):
        (copy / name).write_bytes(b"x")
    done = CliRunner().invoke(group, ["verify", str(copy)])
    assert done.exit_code == 0, done.output
    assert "not part of the bundle: .DS_Store, info.txt, out.npz, report" in done.stdout
    found = json.loads(CliRunner().invoke(group, ["verify", str(copy), "--json"]).stdout)
    assert found["extra_files"] == [".DS_Store", "info.txt", "out.npz", "report"]


LOADABLE = ("json.py", "a.pyc", "a.PYD", "x.pth", "lib.so", "lib.so.1.2", "a.dll", "m.onnx", "m.onnx.data", "m.ort")


@pytest.mark.parametrize("name", [*LOADABLE, "selftest/x.npz", "out/x.npz", "models/__pycache__/cli.c.pyc"])
def test_other_files_that_could_be_loaded_are_refused(name: str, copy: Path) -> None:
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_bytes(b"x")
    with pytest.raises(BundleError, match="is not in the manifest") as caught:
        open_bundle(copy)
    assert name in caught.value.problem
    assert ("__pycache__" in caught.value.fix) == ("__pycache__" in name)


def test_outputs_stay_out_of_the_bundle(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", INPUT)
    monkeypatch.chdir(copy)
    infer = ["infer", str(tmp_path / "x.npy")]
    assert main(infer, root=Path()) == 0
    assert copy.with_name(f"{copy.name}.outputs.npz").is_file()
    assert main([*infer, "-o", "out.npz"], root=Path()) == 0
    assert main(["verify"], root=Path()) == 0
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    for place in ("manifest.json", "edgeq_run.py", "new.py", "models/out.npz", "../" + copy.name + "/manifest.json"):
        assert main([*infer, "-o", place, "--force"], root=Path()) == 6
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_command_refuses_a_changed_bundle(copy: Path) -> None:
    directories.flipped_byte(copy)
    done = CliRunner().invoke(group, ["verify", str(copy)])
    assert done.exit_code == 7
    assert "was changed" in done.stderr
    assert done.stdout == ""


def test_command_reports_a_failing_self_test(tmp_path: Path) -> None:
    from edgeq.bundle.plan import BundleSpec
    from edgeq.bundle.write import write_bundle

    model = linear(tmp_path / "m.onnx", 0.5)
    write_bundle(BundleSpec("x", (variant("v", model, 0.0),)), tmp_path / "b")
    done = CliRunner().invoke(group, ["verify", str(tmp_path / "b"), "--json"])
    assert done.exit_code == 10
    assert json.loads(done.stdout)["passed"] is False
    assert "variant v failed" in done.stderr


def test_a_bundle_of_the_first_schema_verifies(copy: Path) -> None:
    """The first schema stores vectors as files and the runner as a folder of modules."""
    (copy / "selftest").mkdir()
    (copy / "edgeq_device").mkdir()
    (copy / "edgeq_device" / "cli.py").write_text("")
    for name in ("inputs-0", "outputs-0"):
        write_npz(copy / "selftest" / f"{name}.npz", read_arrays(copy / "selftest.npz" / name))

    def as_files(info: dict[str, Any]) -> None:
        info["selftest"]["cases"] = [{"inputs": "selftest/inputs-0.npz", "outputs": "selftest/outputs-0.npz"}]

    directories.change_info(copy, as_files)
    for name in ("edgeq_run.py", "__main__.py", "edgeq_device.zip"):
        (copy / name).unlink()
    directories.seal(copy)
    directories.edit_manifest(copy, lambda m: m["additional_metadata"]["edgeq"].update(bundle_schema="1.0"))
    done = CliRunner().invoke(group, ["verify", str(copy), "--variant", "plain"])
    assert done.exit_code == 0, done.output
    assert "plain: passed" in done.output
