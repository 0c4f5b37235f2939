"""`edgeq verify`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from edgeq_device.cli import main
from edgeq_device.errors import BundleError
from edgeq_device.package import open_bundle

from edgeq.bundle.verify import verify_bundle
from edgeq.cli import group

from .attacks import directories
from .samples import INPUT, linear, variant


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
    assert check.max_error <= check.tolerance


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


def test_a_bundle_that_was_used_is_whole(copy: Path) -> None:
    """Outputs and notes of people at its top are named; whatever could be loaded is refused."""
    for name in ("out.npz", "info.txt", ".DS_Store", "report"):
        (copy / name).write_bytes(b"x")
    done = CliRunner().invoke(group, ["verify", str(copy)])
    assert done.exit_code == 0, done.output
    assert "not part of the bundle: .DS_Store, info.txt, out.npz, report" in done.stdout
    found = json.loads(CliRunner().invoke(group, ["verify", str(copy), "--json"]).stdout)
    assert found["extra_files"] == [".DS_Store", "info.txt", "out.npz", "report"]


LOADABLE = ("json.py", "a.pyc", "a.PYD", "x.pth", "lib.so", "lib.so.1.2", "a.dll", "m.onnx", "m.onnx.data", "m.ort")


@pytest.mark.parametrize("name", [*LOADABLE, "selftest/x.npz", "out/x.npz", "edgeq_device/__pycache__/cli.c.pyc"])
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
    for place in ("manifest.json", "edgeq_run.py", "new.py", "selftest/out.npz", "../" + copy.name + "/manifest.json"):
        assert main([*infer, "-o", place, "--force"], root=Path()) == 6
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_command_refuses_a_changed_bundle(copy: Path) -> None:
    directories.flipped_byte(copy)
    done = CliRunner().invoke(group, ["verify", str(copy)])
    assert done.exit_code == 7
    assert "was changed" in done.stderr
    assert done.stdout == ""


def test_command_reports_a_failing_self_test(tmp_path: Path) -> None:
    from edgeq.bundle.write import BundleSpec, write_bundle

    model = linear(tmp_path / "m.onnx", 0.5)
    write_bundle(BundleSpec("x", (variant("v", model, 0.0),)), tmp_path / "b")
    done = CliRunner().invoke(group, ["verify", str(tmp_path / "b"), "--json"])
    assert done.exit_code == 10
    assert json.loads(done.stdout)["passed"] is False
    assert "variant v failed" in done.stderr
