"""Test a bundle's report. `edgeq report` makes it again without changing the bundle, whatever the record contains."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from edgeq_device.measure.bench_settings import BenchSettings

from edgeq import demo
from edgeq.bundle.verify import open_checked, read_contents
from edgeq.bundle.write import write_archive
from edgeq.cli import group
from edgeq.data.open_source import Data
from edgeq.errors import BundleError, DataError, OutputError, UsageError
from edgeq.jobs.package import package
from edgeq.measure.task import make_task
from edgeq.reporting.bundle import report_bundle
from edgeq.util.records import plain

from . import samples


def replace_file(bundle: Path, name: str, content: bytes) -> None:
    """Replace a file of a bundle and its hash in the manifest, as an attacker would."""
    (bundle / name).write_bytes(content)
    place = bundle / "manifest.json"
    manifest = json.loads(place.read_text("utf-8"))
    record = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    manifest["additional_metadata"]["edgeq"]["files"][name] = record
    place.write_text(json.dumps(manifest), "utf-8")


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def test_a_bundle_carries_its_report(bundle: Path) -> None:
    with open_checked(bundle) as found:
        assert {"report.html", "report.json"} <= set(found.files)
    page = (bundle / "report.html").read_text("utf-8")
    for title in ("Accuracy", "Layers", "Coverage", "Ranges of the worst tensors", "How it is quantized"):
        assert f">{title}</h2>" in page
    record = json.loads((bundle / "report.json").read_text("utf-8"))
    (variant,) = record["variants"].values()
    assert variant["layers"]["activations"]
    assert variant["histograms"]
    assert "speed" not in variant


def test_the_report_keeps_a_bundle_reproducible(bundle: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    package(
        demo.MODEL,
        Data(demo.CALIBRATION, count=16),
        again,
        val=Data(demo.VALIDATION, count=32),
        task=make_task("classification"),
        with_float=True,
    )  # this build is timed, but the files must not contain the times
    for name in ("report.json", "report.html", "manifest.json"):
        assert (again / name).read_bytes() == (bundle / name).read_bytes(), name


def test_it_is_rebuilt_beside_the_bundle(copy: Path) -> None:
    done = report_bundle(copy)
    assert done.page == copy.parent / "bundle.report.html"
    assert "keeps float32" in plain(done)["verdict"] or "of top-1" in plain(done)["verdict"]
    page = done.page.read_text("utf-8")
    with open_checked(copy) as found:
        assert found.manifest_sha256 in page
    report_bundle(copy)  # an earlier report is replaced
    assert done.page.read_text("utf-8") == page
    done.page.write_text(page.replace("<body>", "<body><p>my notes</p>", 1), "utf-8")
    with pytest.raises(OutputError, match="exists already"):
        report_bundle(copy)  # the user has changed it
    assert "my notes" in done.page.read_text("utf-8")


def test_measuring_adds_latency_and_layer_times(bundle: Path, tmp_path: Path) -> None:
    done = report_bundle(bundle, tmp_path / "r.html", measure=True, settings=BenchSettings(min_duration_s=0.05))
    assert done.data.timing is not None
    assert "float32" in done.data.timing.models
    layers = done.data.variants[0].drawn_layers[0]
    assert any(layer.int8_us for layer in layers)
    assert any(layer.float_us for layer in layers)
    assert ">Latency</h2>" in done.page.read_text("utf-8")


def test_a_bundle_without_a_record_still_has_a_report(copy: Path, tmp_path: Path) -> None:
    replace_file(copy, "report.json", b"{}")
    done = report_bundle(copy, tmp_path / "r.html")
    (variant,) = done.data.variants
    assert variant.coverage is not None
    assert variant.primary is not None
    assert variant.bytes


def test_a_tuning_record_is_drawn(copy: Path, tmp_path: Path) -> None:
    replace_file(copy, "tuning.json", json.dumps(samples.tuning()).encode())
    done = report_bundle(copy, tmp_path / "r.html")
    assert done.data.tuning is not None
    assert "Accuracy against latency" in done.page.read_text("utf-8")


def test_next_lines_of_a_record_name_no_bundle(tmp_path: Path) -> None:
    missed = [{**one, "status": "short", "reason": "x"} for one in samples.tuning()["candidates"]]
    place = tmp_path / "found nothing.json"
    place.write_text(json.dumps({**samples.tuning(), "chosen": None, "candidates": missed}), "utf-8")
    shown = CliRunner().invoke(group, ["report", str(place)])
    assert shown.exit_code == 0, shown.output
    assert "look closer: edgeq tune MODEL.onnx --data SAMPLES --max-drop MORE --resume -o BUNDLE\n" in shown.stdout
    assert "next:" not in shown.stdout


def test_the_next_line_of_a_bundle_verifies_it(copy: Path) -> None:
    shown = CliRunner().invoke(group, ["report", str(copy)])
    assert shown.stdout.endswith(f"next: edgeq verify {copy}\n")


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"a": NaN}', b"\xff", b'{"x":' + b"[" * 100 + b"]" * 100 + b"}"])
def test_a_record_that_is_no_json_object_is_refused(copy: Path, tmp_path: Path, content: bytes) -> None:
    replace_file(copy, "report.json", content)
    with pytest.raises(BundleError, match=r"report\.json"):
        report_bundle(copy, tmp_path / "r.html")


def test_a_hostile_record_invents_no_variant(copy: Path, tmp_path: Path) -> None:
    record = samples.renamed(samples.record(), samples.HOSTILE[0])
    replace_file(copy, "report.json", json.dumps(record).encode())
    done = report_bundle(copy, tmp_path / "r.html")
    with open_checked(copy) as found:
        assert [v.name for v in done.data.variants] == [v.name for v in found.components["model"]]
    assert done.page.read_text("utf-8").count("<script") == 1


def test_a_tuning_run_without_a_bundle_has_a_report(tmp_path: Path) -> None:
    place = tmp_path / "run.json"
    place.write_text(json.dumps({**samples.tuning(), "chosen": None, "needed": ["more time"]}), "utf-8")
    done = report_bundle(place)
    assert done.page == tmp_path / "run.report.html"
    page = done.page.read_text("utf-8")
    assert "Goal not met" in page
    assert "more time" in page
    with pytest.raises(UsageError, match="cannot be timed"):
        report_bundle(place, measure=True)


@pytest.mark.parametrize("content", ["{}", "[1]", '{"schema": "edgeq.bench/2"}', "{"])
def test_any_other_json_is_refused(tmp_path: Path, content: str) -> None:
    place = tmp_path / "other.json"
    place.write_text(content, "utf-8")
    with pytest.raises(DataError, match=r"other\.json"):
        report_bundle(place)


def test_keeps_existing_pages_without_force(copy: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine</p>", "utf-8")
    with pytest.raises(OutputError, match="exists already"):
        report_bundle(copy, mine)
    assert mine.read_text("utf-8") == "<p>mine</p>"
    report_bundle(copy, mine, force=True)
    assert "edgeq report" in mine.read_text("utf-8")


def test_not_into_the_bundle_and_not_of_a_model(copy: Path) -> None:
    with pytest.raises(OutputError, match="would no longer verify"):
        report_bundle(copy, copy / "new.html")
    with pytest.raises(UsageError, match="not a bundle"):
        report_bundle(demo.MODEL)


def test_the_command(copy: Path, tmp_path: Path) -> None:
    place = tmp_path / "out.html"
    result = CliRunner().invoke(group, ["report", str(copy), "-o", str(place), "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert sorted(record) == ["bundle", "bytes", "commands", "figures", "report", "status", "verdict", "warnings"]
    assert record["bytes"] == place.stat().st_size
    human = CliRunner().invoke(group, ["report", str(copy), "-o", str(place)])
    assert record["verdict"] in human.output
    refused = CliRunner().invoke(group, ["report", str(demo.MODEL)])
    assert refused.exit_code == 2
    assert "Traceback" not in refused.output


def test_a_report_never_replaces_what_it_is_of(bundle: Path, tmp_path: Path) -> None:
    with open_checked(bundle) as found:
        write_archive(read_contents(found), tmp_path / "b.edgeq")
    before = (tmp_path / "b.edgeq").read_bytes()
    with pytest.raises(OutputError, match="inputs are never replaced"):
        report_bundle(tmp_path / "b.edgeq", tmp_path / "b.edgeq", force=True)
    assert (tmp_path / "b.edgeq").read_bytes() == before
