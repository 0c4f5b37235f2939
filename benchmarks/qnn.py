"""Measure models for Qualcomm's NPU in the NPU's simulator. The benchmark counts the nodes that run on the NPU, and
compares the accuracy with that of float32 and of the CPU.

    python benchmarks/qnn.py [--only NAME ...] [--target hexagon-v73] [--count 50] [--wide NODE ...] [--helper]
    python benchmarks/qnn.py --tune 20m [--only NAME ...] [--count 200] [--seen 500]

With `--helper`, the models are instead built with ONNX Runtime's own helper (get_qnn_qdq_config) and its defaults. With
`--tune`, `edgeq tune` finds the model within a time budget, on samples that are not used to judge it. If a case has
only one set of samples, tuning uses every second sample, and the others judge the model. With `--tune`, the reported
loss is the loss on all judging samples on the CPU, plus the additional loss in the simulator on `--count` of them
(docs/tune.md). The benchmark needs onnxruntime-qnn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from edgeq_device.bundle.package import MAIN, open_bundle
from tasks import shared_data
from tune_cases import Case, cases

import edgeq
from edgeq.backends.base import backend_for
from edgeq.data.open_source import Data
from edgeq.data.samples import Samples, open_samples
from edgeq.errors import GoalNotMetError
from edgeq.hardware.target import Target, resolve
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.model.load import model_signature, read_model
from edgeq.model.prepare import prepare_model
from edgeq.model.sizes import free_sizes
from edgeq.prove.job import build
from edgeq.prove.prepare import collect_statistics, prepare
from edgeq.prove.request import Request
from edgeq.run.engines import find_backend_engine
from edgeq.run.session import Engines, SessionSettings, open_session
from edgeq.tuning.accuracy import AccuracyMeter
from edgeq.tuning.budget import parse_budget
from edgeq.tuning.goal import Goal
from edgeq.tuning.measurements import Assessment
from edgeq.util.display import Silent
from edgeq.util.numbers import parse_drop

FLOAT, CPU, NPU = "float32", "CPU", "simulator"


def spread(case: Case, count: int) -> Samples:
    """Return about `count` samples, spread over all samples of the case, because folders are sorted by class."""
    samples = case.open(case.judged_on)
    return open_samples(samples, model_signature(case.model), stride=max(1, len(samples) // count), count=count)


def every_second(case: Case, source: Path, first: int, most: int | None = None) -> Samples:
    """Return samples that are spread over all samples of `source`. If tuning and judging share one set of samples,
    return every second sample from `first` on.
    """
    stride = 1 + (case.tuned_on == case.judged_on)
    samples, first = case.open(source), first % stride
    if most is not None:
        stride *= max(1, len(samples) // (most * stride))
    return open_samples(samples, model_signature(case.model), start=first, stride=stride, count=most)


def sizes_of(case: Case) -> dict[str, int]:
    """Return a number for the free batch size. It is the number of rows in a sample, which is large for anomaly
    detection.
    """
    rows: int = next(iter(next(iter(case.open(case.judged_on, 1))).inputs.values())).shape[0]
    return dict.fromkeys(free_sizes(read_model(case.model)), rows)


def with_edgeq(case: Case, target: Target, wide: tuple[str, ...], folder: Path) -> tuple[Path, list[str]]:
    """Return the model that edgeq builds, and edgeq's notes."""
    data = Data(case.data, case.preprocess, count=case.count)
    request = Request(case.model, data, fix=sizes_of(case))
    job = collect_statistics(prepare(request, folder / "work"))
    built = build(job, target, target.profile.scheme.replace(wide=wide), folder / "int8.onnx")
    return built.artifact.model, list(built.artifact.notes)


def with_helper(case: Case, folder: Path) -> tuple[Path, list[str]]:
    """Return the model that ONNX Runtime's helper builds, and no notes."""
    from onnxruntime.quantization import CalibrationDataReader, quantize
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model

    prepared = prepare_model(case.model, folder / "fixed", simplify=False, fix=sizes_of(case))
    source = folder / "helped.onnx"
    if not qnn_preprocess_model(str(prepared.path), str(source)):
        source = prepared.path

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._feeds = (dict(sample.inputs) for sample in case.open(case.data, case.count))

        def get_next(self) -> Any:
            return next(self._feeds, None)

    quantize(source, folder / "int8.onnx", get_qnn_qdq_config(str(source), Reader()))
    return folder / "int8.onnx", []


def with_tune(case: Case, target: Target, budget: str, seen: int, folder: Path) -> tuple[Path, list[str]]:
    """Return the Q/DQ model from the bundle that `edgeq tune` wrote, and a note on its choice. Tuning uses `seen`
    samples.
    """
    tuned = edgeq.tune(
        case.model,
        Data(case.data, case.preprocess, count=case.count),
        folder / "tuned",
        val=every_second(case, case.tuned_on, 0, seen),
        target=target.name,
        task=case.make_task(),
        goal=Goal(max_drop=parse_drop(case.max_drop) or 0.0, budget_s=parse_budget(budget)),
        fix=sizes_of(case),
        selftest=1,
        progress=Steps(),
    )
    chosen = tuned.record["chosen"]
    kept = folder / "tuned.onnx"
    with open_bundle(tuned.bundle) as bundle:
        variant = next(v for v in bundle.components[MAIN] if v.name == target.name)
        assert variant.model is not None
        shutil.copyfile(variant.model, kept)
    fields = ("method", "recoveries", "wide", "wide_share", "loss", "simulator")
    return kept, [f"NPU tuned in {tuned.record['elapsed_s']:.0f} s: {json.dumps({k: chosen[k] for k in fields})}"]


class Steps(Silent):
    """Print notes with the time, on stderr."""

    def note(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def judged(case: Case, model: Path, there: Any, count: int, folder: Path) -> Assessment:
    """Return the loss of a model in the simulator on samples that tuning did not see. All these samples run on the CPU.
    `count` of them also run in the simulator.
    """
    meter = AccuracyMeter(
        every_second(case, case.judged_on, 1), case.model, folder / "judged", task=case.make_task(), loss_kind="seen"
    )
    here = open_session(model, SessionSettings(optimization="none"))
    whole = meter.assess("tuned", lambda: here, meter.total, lambda seen: None)
    return meter.simulate("tuned", here, there, min(count, meter.total), whole, lambda seen: None)[0]


def run(
    case: Case,
    target: Target,
    count: int,
    wide: tuple[str, ...],
    helper: bool,
    tune: str | None,
    seen: int,
    folder: Path,
) -> dict[str, Any]:
    """Build and judge the model of a case, print the figures, and return them."""
    began = time.perf_counter()
    if tune is not None:
        model, notes = with_tune(case, target, tune, seen, folder)
    else:
        model, notes = with_helper(case, folder) if helper else with_edgeq(case, target, wide, folder)
    took = time.perf_counter() - began
    task, samples = case.make_task(), spread(case, count)
    engine = find_backend_engine(backend_for(target).name, target.device.get("engine_options", {}))
    with Engines() as engines:
        began = time.perf_counter()
        there = engines.open(model, SessionSettings(engine=engine))
        opened = time.perf_counter() - began
        row = {"name": case.name, "build_s": round(took, 1), "open_s": round(opened, 1)}
        row["notes"] = [note for note in notes if "NPU" in note or "CPU" in note or "cross" in note]
        if tune is not None:
            lost = judged(case, model, there, count, folder)
            found = {"points_lost": lost.drop, "low": lost.low, "high": lost.high}
            return {**row, "simulated": lost.samples, **{name: round(100 * x, 2) for name, x in found.items()}}
        sessions = {FLOAT: open_session(case.model), CPU: open_session(model), NPU: there}
        began = time.perf_counter()
        shown = evaluate_sessions(sessions, samples, task=task, reference=FLOAT)
        ran = time.perf_counter() - began
        near = evaluate_sessions({CPU: sessions[CPU], NPU: there}, samples, reference=CPU, count=8)
    return {
        **row,
        "samples": shown.samples,
        "accuracy": {name: accuracy.value for name, accuracy in shown.accuracy.items()},
        "sqnr_db": {name: shown.agreement[name].sqnr_db for name in (CPU, NPU)},
        "simulator_to_cpu_db": near.agreement[NPU].sqnr_db,
        "ms_per_sample": round(1000 * ran / shown.samples, 1),
    }


def main() -> None:
    """Run the chosen cases, then print and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--target", default="hexagon-v73", help="target of the build")
    parser.add_argument("--count", type=int, default=50, help="number of samples that judge the result")
    parser.add_argument("--wide", nargs="*", default=[], help="nodes with 16-bit activations; * for all")
    parser.add_argument("--helper", action="store_true", help="build with ONNX Runtime's helper instead")
    parser.add_argument("--tune", metavar="BUDGET", help="let edgeq tune find the model, in this time: 20m")
    parser.add_argument("--seen", type=int, default=1000, help="largest number of samples that tuning sees")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    root = shared_data()
    if root is None:
        raise SystemExit("shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for case in cases(root, Path(name) / "halves"):
            if given.only and case.name not in given.only:
                continue
            folder = Path(name) / case.name.replace(" ", "-")
            folder.mkdir()
            try:
                row = run(
                    case,
                    resolve(given.target),
                    given.count,
                    tuple(given.wide),
                    given.helper,
                    given.tune,
                    given.seen,
                    folder,
                )
            except GoalNotMetError as error:
                row = {"name": case.name, "missed": str(error)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"edgeq": edgeq.__version__, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
