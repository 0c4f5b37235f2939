"""Run the demo from end to end with the shortest bench. The tests check its texts, not its speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.latency import WarmUp

from edgeq import demo
from edgeq.errors import OutputError
from edgeq.jobs import demo as module
from edgeq.jobs.demo import Demonstration, demonstrate, write_files
from edgeq.util.records import plain


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def shown(place: Path) -> Demonstration:
    with pytest.MonkeyPatch.context() as patch:
        warm_up = WarmUp(min_s=0.0, max_s=0.1)
        patch.setattr(
            module, "BenchSettings", lambda: BenchSettings(min_duration_s=0.05, min_queries=5, warm_up=warm_up)
        )
        demonstrate(place / "bundle")
        return demonstrate(place / "bundle")  # replaces the first bundle


def test_int8_is_within_a_point_of_float32(shown: Demonstration) -> None:
    float32, int8 = shown.rows
    assert (float32.name, int8.name) == ("float32", "int8")
    assert int8.top1 >= float32.top1 - 0.01
    assert int8.int8_mac_share >= 0.95
    assert float32.int8_mac_share == 0
    assert int8.bytes < float32.bytes
    assert 0 < int8.p50_ms <= int8.p90_ms <= int8.p99_ms


def test_every_step_leaves_its_result(shown: Demonstration, place: Path) -> None:
    assert plain(shown.verified)["passed"]
    assert shown.match.profile.name in shown.packaged.variants
    record = plain(shown)
    json.dumps(record, allow_nan=False)
    assert record["bundle"] == str(place / "bundle")
    assert [row["name"] for row in record["table"]] == ["float32", "int8"]
    assert (place / "bundle" / "edgeq_run.py").is_file()


def test_the_files_are_written_to_a_new_folder_alone(tmp_path: Path) -> None:
    written = write_files(tmp_path / "digits")
    assert [path.name for path in written] == ["calibration.npz", "model.onnx", "validation.npz"]
    assert (tmp_path / "digits" / "model.onnx").read_bytes() == demo.MODEL.read_bytes()
    with pytest.raises(OutputError, match="exists already"):
        write_files(tmp_path / "digits")


@pytest.mark.parametrize(
    "content",
    [
        b"mine",
        b"{}",
        b'{"additional_metadata": {"edgeq": {"source_model_sha256": "0"}}}',
        b"[]",
        b"\xff",
        b"[" * 100_000,
    ],
    ids=["text", "empty", "another model", "a list", "no text", "too deep"],
)
def test_keeps_folders_that_are_not_demos(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(OutputError, match="exists already"):
        demonstrate(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == content
