"""Test reports of boards: the table of the page, `targets show`, and files that are no reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgeq.cli import group
from edgeq.errors import HardwareError
from edgeq.hardware.measured import draw_table, load_reports, read_report

SPEEDUP = {"estimate": 2.1, "low": 2.0, "high": 2.2, "confidence": 0.95, "pairs": 6, "baseline_ms": 0.42, "ms": 0.2}
REPORT: dict[str, Any] = {
    "schema": "edgeq.board-report/1",
    "target": "raspberry-pi-5",
    "profile": "arm64-dotprod",
    "board": "Raspberry Pi 5 Model B Rev 1.0",
    "compatible": ["raspberrypi,5-model-b", "brcm,bcm2712"],
    "cpu": "Cortex-A76",
    "architecture": "arm64",
    "cores": 4,
    "system": "Linux 6.12",
    "governors": ["performance"],
    "versions": {"onnxruntime": "1.32.0"},
    "engines": {},
    "drivers": {},
    "before": {},
    "after": {},
    "bundles": [
        {
            "name": "demo",
            "manifest_sha256": "0" * 64,
            "passed": True,
            "variants": [{"name": "arm64-dotprod", "status": "passed", "max_abs_error": 0.0, "tolerance": 0.1}],
            "latency": {
                "float32": {"p50_ms": 0.42, "p90_ms": 0.5, "p99_ms": 0.6},
                "arm64-dotprod": {"p50_ms": 0.2, "p90_ms": 0.3, "p99_ms": 0.4},
            },
            "variant": "arm64-dotprod",
            "speedup": SPEEDUP,
        }
    ],
}


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's folder of targets, with one report."""
    monkeypatch.setattr("platformdirs.user_config_path", lambda app: tmp_path / app)
    folder = tmp_path / "edgeq" / "targets"
    (folder / "measured").mkdir(parents=True)
    (folder / "measured" / "pi.json").write_text(json.dumps(REPORT))
    return folder


def test_the_page_and_the_target_state_a_report(targets: Path) -> None:
    *_, row = draw_table(load_reports((targets,)))
    assert row == (
        "| Raspberry Pi 5 Model B Rev 1.0 | `raspberry-pi-5` | Linux 6.12 | 1.32.0 | demo | 0.42 ms | 0.2 ms | 2.10 "
        "(2.00 to 2.20) | passed |"
    )
    assert draw_table(load_reports(())) == ["No board has been measured yet."]
    shown = CliRunner().invoke(group, ["targets", "show", "raspberry-pi-5"]).stdout
    assert "measured      Raspberry Pi 5 Model B Rev 1.0, Linux 6.12, onnxruntime 1.32.0" in shown
    assert "2.10 times float32's speed (2.00 to 2.20; 0.42 → 0.2 ms)" in shown
    assert "measured" not in CliRunner().invoke(group, ["targets", "show", "raspberry-pi-4"]).stdout


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"board": "a | <script>"}, "board"),
        ({"system": "/home/jane"}, "system"),
        ({"cpu": "x" * 121}, "cpu"),
        ({"schema": "edgeq.board-report/2"}, "schema"),
        ({"bundles": REPORT["bundles"] * 65}, "bundles"),
        ({"notes": "x" * (1 << 16)}, "larger than 64 KiB"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({**REPORT, **change}))
    with pytest.raises(HardwareError, match=problem):
        read_report(file)
