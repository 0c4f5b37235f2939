"""`edgeq verify`."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from edgeq.bundle.verify import verify_bundle
from edgeq.cli import group

from .attacks import directories
from .samples import linear, variant


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
        "architecture",
        "onnxruntime",
        "passed",
        "variants",
    }
    human = CliRunner().invoke(group, ["verify", str(good)])
    assert "all hashes right" in human.stdout
    assert "it is for" in human.stdout


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
