"""Run the main workflow on the built-in demo model: detect, calibrate, quantize, bundle, verify, bench."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq_device.bundle.verify import Report
from edgeq_device.measure.bench_settings import BenchSettings

from edgeq import demo
from edgeq.bundle.verify import check_report, verify_bundle
from edgeq.data.open_source import Data
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.profile import ProfileMatch, load_profiles, match_profile
from edgeq.hardware.target import THIS_MACHINE
from edgeq.jobs.package import Packaged, package
from edgeq.measure.bench import bench
from edgeq.measure.latency import Measurement
from edgeq.measure.task import make_task
from edgeq.model.digests import model_digest
from edgeq.prove.proof import FLOAT, INT8
from edgeq.util.display import SILENT, Progress
from edgeq.util.marker import read_object
from edgeq.util.outputs import output_directory


@dataclass(frozen=True)
class DemoRow:
    """Hold one line of the final table. Latencies are in milliseconds and from the single-stream scenario."""

    name: str
    p50_ms: float
    p90_ms: float
    p99_ms: float
    bytes: int
    top1: float
    int8_mac_share: float


@dataclass(frozen=True)
class Demonstration:
    """Hold the result of each step of the workflow."""

    machine: Machine
    match: ProfileMatch
    packaged: Packaged
    verified: Report
    measurement: Measurement

    @property
    def rows(self) -> tuple[DemoRow, DemoRow]:
        """Return the rows of float32 and int8."""
        ((variant_name, variant),) = self.packaged.variants.items()
        coverage = {FLOAT: 0.0, INT8: variant.proof.coverage.int8_mac_share or 0.0}
        size = {FLOAT: demo.MODEL.stat().st_size, INT8: variant.bytes}
        rows = []
        for name, measured_as in ((FLOAT, FLOAT), (INT8, variant_name)):
            latency = self.measurement.latency(measured_as)
            rows.append(
                DemoRow(
                    name,
                    latency["p50_ms"],
                    latency["p90_ms"],
                    latency["p99_ms"],
                    size[name],
                    variant.proof.accuracy[name].metrics["top1"],
                    coverage[name],
                )
            )
        return rows[0], rows[1]

    def __record__(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "match": self.match,
            "package": self.packaged,
            "verify": self.verified,
            "bench": self.measurement,
            "table": self.rows,
            "bundle": str(self.packaged.bundle),
        }


def demonstrate(output: Path, *, force: bool = False, progress: Progress = SILENT) -> Demonstration:
    """Run every stage on the built-in model, and write the bundle to `output`. If `output` is an earlier demo bundle,
    it is replaced.

    Raises:
        OutputError: `output` contains something else, and `force` is not given.
        CheckFailedError: the self-test fails.
    """
    machine = detect_machine()
    packaged = package(
        demo.MODEL,
        Data(demo.CALIBRATION),
        output,
        targets=(THIS_MACHINE,),
        val=Data(demo.VALIDATION),
        task=make_task("classification"),
        with_float=True,
        timed=False,  # the benchmark below times it
        force=force or _is_demo(output),
        progress=progress,
    )
    verified = verify_bundle(output, progress=progress)
    check_report(verified)
    measurement = bench(output, settings=BenchSettings(), progress=progress)
    return Demonstration(machine, match_profile(machine, load_profiles()), packaged, verified, measurement)


def write_files(folder: Path) -> tuple[Path, ...]:
    """Write the demo's model and samples to `folder`, which must be new or empty, and return their paths.

    Raises:
        OutputError: `folder` is not empty, or cannot be written.
    """
    with output_directory(folder) as draft:
        for file in (demo.MODEL, demo.CALIBRATION, demo.VALIDATION):
            shutil.copyfile(file, draft / file.name)
    return tuple(sorted(folder.iterdir()))


def _is_demo(place: Path) -> bool:
    """Return whether `place` is a bundle of the built-in model."""
    manifest = read_object(place / "manifest.json") or {}
    try:
        recorded = manifest["additional_metadata"]["edgeq"]["source_model_sha256"]
    except (KeyError, TypeError):
        return False
    return bool(recorded == model_digest(demo.MODEL))
