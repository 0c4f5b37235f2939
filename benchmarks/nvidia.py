"""Check the limits for the TensorRT backend without a GPU: placement by the checker, simulated accuracy, calibration
tables, and the fallback.

    python benchmarks/nvidia.py [--only SECTION ...] [--case NAME ...] [--target NAME]

Accuracy is measured with the float32 twin of the Q/DQ graph on a CPU (docs/nvidia.md describes what this means).
Latency is not measured, because that needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from models import mobilenetv2_shaped, resnet50_shaped
from tasks import shared_data

from edgeq.backends.base import backend_for
from edgeq.calibration.plan import quantizable_tensors
from edgeq.calibration.ranges import Range
from edgeq.calibration.table import FLATBUFFERS, write_tables
from edgeq.data.open_source import Data
from edgeq.errors import CalibrationError
from edgeq.hardware.target import resolve
from edgeq.jobs.quantize import quantize
from edgeq.jobs.tune import tune
from edgeq.measure.task import TaskOptions, make_task
from edgeq.model.prepare import prepare_model
from edgeq.tuning.goal import Goal

SPECS = Path(__file__).resolve().parent / "specs"
PLAIN_BAR, TUNED_BAR = 0.03, 0.01
Row = tuple[str, str, bool]


@dataclass(frozen=True)
class Case:
    """Describe a model with labelled samples: the calibration and validation samples, the task and its options."""

    name: str
    folder: str
    data: Path
    validation: str | Path
    task: str = "classification"
    options: TaskOptions = field(default_factory=TaskOptions)


def cases(root: Path) -> Iterator[Case]:
    """Yield the labelled models of shared/data."""
    images, coco, words = root / "imagenet-sample", root / "coco256", root / "mlperf_tiny_vww" / "data"
    cifar = root / "cifar10"
    yield Case("resnet20", "resnet20_cifar10", cifar / "calib_lossless_300.npz", cifar / "test_jpeg_3000.npz")
    yield Case("vww", "mlperf_tiny_vww", words / "calib_100.npz", words / "val_*.npz")
    shifted = TaskOptions(class_offset=1)
    yield Case("mobilenet", "mobilenet_v1_0.25_224", images / "calib", images / "val", options=shifted)
    boxes = TaskOptions(annotations=coco / "instances_val.json", decoder="yolox")
    yield Case("yolox_nano", "yolox_nano", coco / "calib", coco / "val", "detection", boxes)


def placement(target: str, only: Sequence[str]) -> list[Row]:
    """Check the placement of layers. Weights and ranges are random, because the checker only uses the structure."""
    rows: list[Row] = []
    for make in (resnet50_shaped, mobilenetv2_shaped):
        with tempfile.TemporaryDirectory() as folder:
            prepared = prepare_model(make(Path(folder) / "model.onnx"), Path(folder) / "work")
            tensors = quantizable_tensors(prepared.model)
            ranges = dict.fromkeys(tensors, Range(-4.0, 4.0))
            chosen = resolve(target)
            artifact = backend_for(chosen, ranges).build(
                prepared, ranges, chosen.profile.scheme, Path(folder) / "built.onnx", samples=None
            )
        found = artifact.details["placement"]
        weighted = [node for node in found["nodes"] if node["op_type"] in ("Conv", "Gemm")]
        rest = Counter(node["precision"] for node in found["nodes"] if node not in weighted)
        int8 = sum(node["precision"] == "int8" for node in weighted)
        findings = "; ".join(found["findings"]) or "none"
        name = make.__name__
        rows.append((f"{name}: every Conv and Gemm int8", f"{int8} of {len(weighted)}", int8 == len(weighted)))
        rows.append(
            (f"{name}: no pair on a bias, on an Add's main branch or without use", findings, findings == "none")
        )
        said = ", ".join(f"{count} {kind}" for kind, count in sorted(rest.items()))
        rows.append((f"{name}: all else fp16, or fused into int8", said, set(rest) <= {"int8", "fp16"}))
    return rows


def accuracy(target: str, only: Sequence[str]) -> list[Row]:
    """Measure how many points are lost against float32 on all validation samples, without and with tuning."""
    root = shared_data()
    if root is None:
        print("accuracy: skipped, shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
        return []
    rows: list[Row] = []
    for case in cases(root):
        if only and case.name not in only:
            continue
        model, spec = root / case.folder / "model.onnx", SPECS / f"{case.folder}.toml"
        data, validation = Data(str(case.data), str(spec)), Data(str(case.validation), str(spec))
        task = make_task(case.task, case.options)
        with tempfile.TemporaryDirectory() as folder:
            plain = quantize(
                model,
                data,
                Path(folder) / "plain.onnx",
                target=target,
                val=validation,
                task=task,
                timed=False,
            )
            lost = plain.proof.drop or 0.0
            float32 = plain.proof.accuracy["float32"].value
            text = f"{100 * lost:.2f} of {100 * float32:.2f} (int8: {plain.proof.coverage.summary()})"
            rows.append((f"{case.name}: loses at most 3.0 points untuned", text, lost <= PLAIN_BAR))
            print_rows(rows[-1:])
            tuned = tune(
                model,
                data,
                Path(folder) / "tuned",
                target=target,
                val=validation,
                task=task,
                goal=Goal(max_drop=TUNED_BAR),
            )
            best = tuned.record["chosen"]
            kept = f"{best['method']}, {len(best['kept_in_float'])} layers in fp16"
            text = f"{100 * best['loss']:.2f} ({best['int8_mac_share']:.1%} of MACs int8, {kept})"
            rows.append((f"{case.name}: at most 1.0 tuned", text, best["loss"] <= TUNED_BAR))
            print_rows(rows[-1:])
    return rows


def tables(target: str, only: Sequence[str]) -> list[Row]:
    """Read the calibration table with the classes that onnxruntime generates from its schema."""
    from onnxruntime.quantization.CalTableFlatBuffers.TrtTable import TrtTable

    ranges = {
        "negative": Range(-27.8, 0.0),
        "outlier": Range(-1.0, 3e4),
        "usual": Range(-2.0, 3.0),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_tables(Path(folder), ranges, tensors=list(ranges))
        table = TrtTable.GetRootAs((Path(folder) / FLATBUFFERS).read_bytes(), 0)
        entries = [table.Dict(i) for i in range(table.DictLength())]
        read = {e.Key().decode(): float(e.Value()) for e in entries}
        try:
            write_tables(Path(folder), ranges, tensors=[*ranges, "missing"])
            refused = "written"
        except CalibrationError as error:
            refused = str(error)
    rows: list[Row] = []
    for name, span in ranges.items():
        rows.append((f"table: absolute maximum, {name}", f"{read[name]:g}", bool(np.isclose(read[name], span.bound))))
    rows.append(("table: refused when a range is missing", refused, "missing" in refused))
    return rows


def fallback(target: str, only: Sequence[str]) -> list[Row]:
    """On this machine, run a bundle that was made for a GPU, in a separate process."""
    from edgeq import demo
    from edgeq.jobs.package import package

    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        package(demo.MODEL, Data(str(demo.CALIBRATION)), bundle, targets=(target,), timed=False)
        run = [sys.executable, str(bundle / "edgeq_run.py"), "info", "--json"]
        told = json.loads(subprocess.run(run, capture_output=True, check=True, text=True).stdout)
    reasons = next(v["reasons"] for v in told["variants"] if v["variant"] == target)
    said = f"{told['chosen']}; {target}: {'; '.join(reasons)}"
    return [("a bundle without NVIDIA software: runs on CPU, says why", said, told["chosen"] == "cpu-float32")]


SECTIONS: dict[str, Callable[[str, Sequence[str]], list[Row]]] = {
    "placement": placement,
    "tables": tables,
    "fallback": fallback,
    "accuracy": accuracy,
}


def print_rows(rows: Sequence[Row]) -> None:
    """Print rows, each with a limit and a measurement."""
    for bar, measured, met in rows:
        print(f"{'met   ' if met else 'MISSED'} | {bar} | {measured}", flush=True)


def main() -> None:
    """Run the chosen sections and print their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run")
    parser.add_argument("--case", nargs="+", default=[], help="models of the accuracy section")
    parser.add_argument("--target", default="nvidia-t4", help="target (default: nvidia-t4)")
    options = parser.parse_args()
    for name in options.only:
        rows = SECTIONS[name](options.target, options.case)
        if name != "accuracy":
            print_rows(rows)


if __name__ == "__main__":
    main()
