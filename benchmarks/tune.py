"""Compare `edgeq tune` with float32 and with an exhaustive grid of ONNX Runtime's own options, in one run on this
machine.

    python benchmarks/tune.py [--quick] [--only NAME ...] [--grid N] [--budget TIME] [--json FILE]

For each model, the benchmark prints the loss of the tuned bundle on the judging samples, its speed against float32, and
the time of tuning. The grid builds, evaluates and times each of 72 settings separately. With --grid N (9 in --quick
mode), the grid consists of only N random settings, and the printed time of the grid is their time multiplied by 72 / N.
The tuned bundle is timed, interleaved, against the fastest setting of the grid that keeps the accuracy.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime
from contenders import edgeq_json
from grid import SIMPLE, Point, run_grid, settings
from tasks import required_data
from tune_cases import Case, chosen
from tuned import race, tune, verdict

from edgeq.data.samples import Samples
from edgeq.measure.accuracy import evaluate
from edgeq.measure.task import Task

LATENCY_BAR, TIME_BAR = 1.03, 0.25
QUICK_GRID = 9
Results = dict[str, Any]


def run_case(case: Case, workdir: Path, grid: int, budget: str | None) -> Results:
    """Tune a case, judge the bundle, run the grid, and compare the bundle with the grid."""
    print(f"\n{case.name}")
    bundle = workdir / "tuned"
    start = time.perf_counter()
    try:
        record = tune(case, bundle, ["--budget", budget] if budget else [])
    finally:
        took = time.perf_counter() - start
        print(f"    took {took:.0f} s", flush=True)
    for line in record["verdict"]:
        print(f"    {line}")
    task, validation = case.make_task(), case.open(case.judged_on)
    float32 = evaluate(case.model, validation, task)
    tuned = evaluate(bundle, validation, task)
    lost = tuned.loss_against(float32)
    print(f"    judged on {tuned.samples} samples: float32 {float32.value:.4f}, tuned {tuned.value:.4f}")
    verdict(f"loses {100 * lost:.2f} points", lost <= case.bar, f"at most {100 * case.bar:.1f}")
    results: Results = {"tune": record, "seconds": took, "float32": float32.value, "tuned": tuned.value, "loss": lost}
    feed = dict(next(iter(validation)).inputs)
    results["speed"] = race(case.model, bundle, feed, "float32")
    verdict(f"{results['speed']:.2f} times float32's speed", results["speed"] > 1, "faster than float32")
    if case.against_int8 is not None:
        point = run_grid(case.model, case.open(case.data, case.count), validation, task, workdir / "int8", [SIMPLE])[0]
        results["against_int8"] = 1 / race(point.model, bundle, feed, str(SIMPLE))
        print(f"    {SIMPLE} has {point.value:.4f}")
        said = f"{results['against_int8']:.3f} times the latency of {SIMPLE}"
        verdict(said, results["against_int8"] <= case.against_int8, f"{case.against_int8}")
    if grid:
        results["grid"] = _against_grid(
            case, bundle, validation, feed, task, max(lost, 0.0), float32.value, took, workdir, grid
        )
    return results


def _against_grid(
    case: Case,
    bundle: Path,
    validation: Samples,
    feed: dict[str, Any],
    task: Task,
    lost: float,
    reference: float,
    took: float,
    workdir: Path,
    count: int,
) -> Results:
    every = settings()
    # Choose at random with a fixed seed, because every n-th setting would be of the same kind.
    drawn = random.Random(0).sample(every, min(count, len(every)))
    points = run_grid(case.model, case.open(case.data, case.count), validation, task, workdir / "grid", drawn)
    sign = 1 if task.higher_is_better else -1
    whole = sum(p.seconds for p in points) * len(every) / len(points)
    said = "" if len(points) == len(every) else f" (from {len(points)} of {len(every)} settings)"
    verdict(
        f"tuned in {took:.0f} s, {took / whole:.0%} of the grid's {whole:.0f} s{said}",
        took <= TIME_BAR * whole,
        f"{TIME_BAR:.0%}",
    )

    def loses(point: Point) -> float:
        return float("inf") if point.value is None else sign * (reference - point.value)

    best = min(points, key=loses)
    print(f"    the grid's most accurate setting, {best.setting}, loses {100 * loses(best):.2f} points")
    equal = [p for p in points if p.p50_ms is not None and loses(p) <= max(lost, case.bar)]
    results: Results = {"seconds": whole, "settings": len(points), "best_loss": loses(best)}
    if not equal:
        print("    no setting of the grid keeps the accuracy, so there is no latency to compare with")
        return results
    fastest = min(equal, key=lambda p: p.p50_ms or 0.0)
    results["latency"] = 1 / race(fastest.model, bundle, feed, str(fastest.setting))
    verdict(
        f"{results['latency']:.3f} times the latency of {fastest.setting}",
        results["latency"] <= LATENCY_BAR,
        f"{LATENCY_BAR}",
    )
    return results


def main() -> None:
    """Run the chosen cases, then print and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose names begin with these")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_GRID} settings of the grid, a budget of 2m per model"
    )
    parser.add_argument("--grid", type=int, help="number of grid settings to run; 0 skips the grid (default: all 72)")
    parser.add_argument("--budget", help="budget of each run of edgeq tune")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    root = required_data()
    grid = options.grid if options.grid is not None else QUICK_GRID if options.quick else len(settings())
    budget = options.budget or ("2m" if options.quick else None)
    machine = edgeq_json("detect")
    print(f"onnxruntime {onnxruntime.__version__}, profile {machine['match']['profile']}")
    results: Results = {"machine": machine}
    with tempfile.TemporaryDirectory() as folder:
        for case, workdir in chosen(root, Path(folder), options.only or ()):
            try:
                results[case.name] = run_case(case, workdir, grid, budget)
            except SystemExit as error:  # edgeq's message, for example that no candidate is faster than float32
                verdict(str(error), False, "a bundle")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
