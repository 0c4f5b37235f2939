"""Compare edgeq's default with ONNX Runtime's default and with float32 in one run on this machine. The results are
figures and ratios.

    python benchmarks/quantize.py [--only SECTION ...] [--json FILE]

Sections: speed (a ResNet-50-shaped model with random weights), accuracy (the labelled tasks of shared/data), demo,
startup. Runs are interleaved, so that a disturbance affects all models equally. A ratio is the ratio of two medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from contenders import Built, edgeq_default, edgeq_json, float32, onnxruntime_default
from edgeq_device.measure.latency import WarmUp, measure_interleaved
from models import resnet50_shaped
from numpy.typing import NDArray
from tasks import Task, demo_task, shared_data, tasks

SPEED_BAR = 2.0
COVERAGE_BAR = 0.95
POINTS_BAR = {"mobilenet_v1_0.25_224": 3.0}
POINTS_BAR_ELSEWHERE = 1.0
STARTUP_BARS = {"--help": 0.2, "detect": 2.5}

Results = dict[str, Any]


def speed(seconds: float) -> Results:
    """Time float32 and the defaults of ONNX Runtime and edgeq on one ResNet-50-shaped model, one image at a time."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = resnet50_shaped(work / "resnet50.onnx")
        images = np.random.default_rng(0).standard_normal((8, 3, 224, 224), dtype=np.float32)
        built = [float32(model), onnxruntime_default(model, images, work), edgeq_default(model, images, work)]
        results: Results = {"coverage": _coverage(built[-1])}
        for threads, title in ((1, "one thread"), (0, "all cores")):
            p50 = _p50(built, images[:1], threads, seconds)
            ratio = p50["onnxruntime default"] / p50["edgeq default"]
            results[title] = {"p50_ms": p50, "edgeq_over_onnxruntime": ratio}
            print(f"\nresnet50-shaped, {title}, p50 latency of one image")
            _table(
                ("", "ms", "times float32", "times onnxruntime default"),
                [
                    (n, f"{v:.2f}", f"{p50['float32'] / v:.2f}", f"{p50['onnxruntime default'] / v:.2f}")
                    for n, v in p50.items()
                ],
            )
            print(
                _verdict(f"edgeq over onnxruntime's default: {ratio:.2f}", ratio >= SPEED_BAR, f"at least {SPEED_BAR}")
            )
        _log_coverage("resnet50-shaped", results["coverage"])
    return results


def accuracy(seconds: float) -> Results:
    """Measure top-1 on the labelled tasks for float32, ONNX Runtime's default and edgeq's default."""
    root = shared_data()
    if root is None:
        print("\naccuracy: skipped, shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
        return {}
    return {task.name: _one_task(task, seconds) for task in tasks(root)}


def demo(seconds: float) -> Results:
    """Measure the built-in demo model."""
    task = demo_task()
    return {task.name: _one_task(task, seconds)}


def startup(seconds: float) -> Results:
    """Measure the wall-clock time of commands that must feel instant. The result is the median over seven new
    processes. They follow a warm-up process that does not count.
    """
    del seconds
    results: Results = {}
    print("\nstart-up, seconds")
    for command, bar in STARTUP_BARS.items():
        runs = []
        for _ in range(8):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-P", "-m", "edgeq", command], capture_output=True, check=True)
            runs.append(time.perf_counter() - start)
        results[command] = statistics.median(runs[1:])
        print(_verdict(f"edgeq {command}: {results[command]:.3f}", results[command] < bar, f"under {bar}"))
    return results


SECTIONS: dict[str, Callable[[float], Results]] = {
    "speed": speed,
    "accuracy": accuracy,
    "demo": demo,
    "startup": startup,
}


def _one_task(task: Task, seconds: float) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        built = [
            float32(task.model),
            onnxruntime_default(task.model, task.calibration, work),
            edgeq_default(task.model, task.calibration, work),
        ]
        first = next(iter(task.validation.values()))[0][:1]
        p50 = _p50(built, first, 1, seconds)
        sessions = {b.name: b.open() for b in built}
        top1 = {part: {n: task.top1(s, part) for n, s in sessions.items()} for part in task.validation}
        coverage = _coverage(built[-1])
        made = {b.name: b.seconds for b in built}
    print(f"\n{task.name}, {len(task.calibration)} calibration samples; top-1, and p50 on one thread")
    parts = list(task.validation)
    _table(
        ("", *parts, "ms", "times float32", "made in s"),
        [
            (n, *(f"{100 * top1[p][n]:.2f}" for p in parts), f"{v:.3f}", f"{p50['float32'] / v:.2f}", f"{made[n]:.1f}")
            for n, v in p50.items()
        ],
    )
    bar = POINTS_BAR.get(task.name, POINTS_BAR_ELSEWHERE)
    for part, (_, _, recorded) in task.validation.items():
        float_top1, int8_top1 = top1[part]["float32"], top1[part]["edgeq default"]
        print(f"{part}: float32 {100 * float_top1:.2f}, on record {100 * recorded:.2f}")
        lost = 100 * (float_top1 - int8_top1)
        print(_verdict(f"{part}: edgeq loses {lost:.2f} points", lost <= bar, f"at most {bar}"))
    _log_coverage(task.name, coverage)
    return {"top1": top1, "p50_ms": p50, "coverage": coverage, "seconds": made}


def _p50(built: Sequence[Built], sample: NDArray[np.float32], threads: int, seconds: float) -> dict[str, float]:
    def runner(one: Built) -> Callable[[], object]:
        session = one.open(threads)
        feed = {session.get_inputs()[0].name: sample}
        return lambda: session.run(None, feed)

    runners = {b.name: runner(b) for b in built}
    measured = measure_interleaved(runners, min_duration_s=seconds, min_runs=30, warmup=WarmUp(max_s=seconds))
    return {name: float(distribution.p50) for name, distribution in measured.items()}


def _coverage(built: Built) -> Mapping[str, Any]:
    coverage: Mapping[str, Any] = built.report["coverage"]
    return coverage


def _log_coverage(name: str, coverage: Mapping[str, Any]) -> None:
    share = coverage["int8_mac_share"]
    print(
        _verdict(f"{name}: {100 * share:.1f} % of MACs in int8", share >= COVERAGE_BAR, f"{100 * COVERAGE_BAR:.0f} %")
    )
    for node in coverage["float_nodes"]:
        print(f"    float: {node['name']} ({node['op_type']}): {node['reason']}")


def _verdict(text: str, met: bool, bar: str) -> str:
    return f"  {'met   ' if met else 'MISSED'} {text} (bar: {bar})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        print("  " + "  ".join(cells))


def main() -> None:
    """Run the chosen sections, then print and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="recorded seconds per model in a timing (default: 3)"
    )
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    machine = edgeq_json("detect")
    versions = f"onnxruntime {onnxruntime.__version__}, Python {platform.python_version()}"
    print(f"{versions}, profile {machine['match']['profile']}")
    results: Results = {"machine": machine, "onnxruntime": onnxruntime.__version__}
    for name in options.only:
        results[name] = SECTIONS[name](options.seconds)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
