"""Check the speeds of the forms that `edgeq tune` writes, with an independent race after all runs.

    python benchmarks/decisions.py [--models NAME ...] [--runs N] [--loads N ...] [--budget TIME] [--json FILE]

For each model, the benchmark runs `edgeq tune` several times on the quiet machine and next to busy loops. After the
last run, it times every form that was written, in new processes, against float32 (on one thread and on all threads; the
faster one counts) and against other int8 forms: those of `edgeq quantize`, per channel and per tensor, in each
installed engine. Int8 forms are compared on the same number of threads. Two kinds of decisions are wrong:

- exit code 0 with a form that runs at less than 0.97 times float32's speed
- exit code 11 with a form that takes more than 1.05 times as long as the fastest int8 form
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnxruntime
from busy import busy, quantize_command
from contenders import edgeq_json
from edgeq_device.measure.claim import make_claim
from edgeq_device.measure.latency import Distribution, WarmUp, measure_interleaved
from edgeq_device.measure.scenarios import make_runner
from tasks import required_data
from tune_cases import Case, cases
from tuned import verdict

from edgeq.hardware.detect import detect_machine
from edgeq.hardware.engines import detect_engines
from edgeq.measure.loaded_model import open_model
from edgeq.measure.timed_model import SESSIONS
from edgeq.run.engines import load_engines
from edgeq.run.session import Engines, SessionSettings

LEAST_SPEED, MOST_LATENCY = 0.97, 1.05
RACE_S = 3.0
Contenders = dict[str, tuple[Path, SessionSettings]]


@dataclass(frozen=True)
class Run:
    """Hold the outcome of one run of `edgeq tune`.

    Attributes:
        code: exit code, 0 or 11.
        load: number of busy loops next to the run.
        record: the tuning record.
        bundle: the bundle that the run wrote.
    """

    code: int
    load: int
    record: Mapping[str, Any]
    bundle: Path
    took_s: float

    @property
    def chosen(self) -> Mapping[str, Any]:
        """Return the record of the candidate that was written."""
        found: Mapping[str, Any] = next(c for c in self.record["candidates"] if c["name"] == self.record["chosen"])
        return found


def tune(case: Case, bundle: Path, load: int, budget: str) -> Run:
    """Run `edgeq tune` next to busy loops. End the program if the command ends neither with 0 nor with 11."""
    data = ["--data", str(case.data), "--val", str(case.tuned_on), *case.preprocessing, *case.options]
    counted = ["--count", str(case.count)] if case.count else []
    limits = ["--max-drop", case.max_drop, "--budget", budget, "--no-memory", "-q", "--json", "-o", str(bundle)]
    command = [sys.executable, "-P", "-m", "edgeq", "tune", str(case.model), *data, *counted, *limits]
    start = time.perf_counter()
    with busy(load):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 11) or not bundle.exists():
        sys.exit(f"edgeq tune ended with {done.returncode}: {done.stderr.strip()}")
    return Run(done.returncode, load, json.loads(done.stdout), bundle, time.perf_counter() - start)


def rivals(case: Case, workdir: Path, threads: Iterable[int]) -> Contenders:
    """Return the int8 forms of `edgeq quantize` in each installed engine and precision that runs models here, with each
    of these numbers of threads.
    """
    engines = load_engines()
    plugins = [
        SessionSettings(engine=engines[state.name], precision=precision)
        for state in detect_engines(detect_machine(), engines)
        if engines[state.name].module and state.version and "CPU" in engines[state.name].devices
        for precision in engines[state.name].precisions
        if not engines[state.name].suffix
    ]
    found: Contenders = {}
    for granularity in ("--per-channel", "--no-per-channel"):
        folder = workdir / granularity.strip("-")
        folder.mkdir()
        made = edgeq_json(*quantize_command(case, folder), granularity, "--no-timing")
        for settings in (SessionSettings(config=made["session_options"]), *plugins):
            where = f"{settings.engine.name}:{settings.precision}" if settings.engine else "onnxruntime"
            for count in threads:
                name = f"quantize {granularity} in {where} on {count or 'all'} threads"
                found[name] = folder / "int8.onnx", replace(settings, intra_op_threads=count)
    return found


def race(contenders: Contenders, feed: Mapping[str, Any]) -> dict[str, Distribution]:
    """Time all contenders, each in several new processes."""
    with Engines() as engines:
        runners = {
            name: [make_runner(session, [feed]) for session in engines.open_apart(model, settings, SESSIONS)]
            for name, (model, settings) in contenders.items()
        }
        return measure_interleaved(runners, min_duration_s=RACE_S, patience_s=RACE_S, warmup=WarmUp(max_s=2))


def judge(case: Case, runs: list[Run], workdir: Path) -> dict[str, Any]:
    """Race the forms that the runs wrote, print the right and the wrong decisions, and return their figures."""
    feed = dict(next(iter(case.open(case.data, 1))).inputs)
    float32 = {f"float32, {n or 'all'} threads": (case.model, SessionSettings(intra_op_threads=n)) for n in (0, 1)}
    with ExitStack() as opened:
        names: dict[Path, str] = {}
        forms: Contenders = {}
        for run in runs:
            one = run.chosen
            names[run.bundle] = f"{one['name']} on {one['threads'] or 'all'} threads"
            if names[run.bundle] not in forms:
                loaded = opened.enter_context(open_model(run.bundle, SessionSettings(intra_op_threads=one["threads"])))
                forms[names[run.bundle]] = loaded.model, loaded.settings
        others = rivals(case, workdir, sorted({run.chosen["threads"] for run in runs}))
        measured = race({**float32, **forms, **others}, feed)
    latency = {name: distribution.drop_disturbed().p50 for name, distribution in measured.items()}
    baseline = min(float32, key=lambda name: latency[name])
    # A busy machine leaves the number of threads to the device, so forms are compared on the same number of threads.
    int8: dict[int, str] = {}
    for name, (_, settings) in {**forms, **others}.items():
        best = int8.setdefault(settings.intra_op_threads, name)
        int8[settings.intra_op_threads] = min(best, name, key=lambda name: latency[name])
    for fastest in int8.values():
        print(f"    fastest int8 form: {fastest}, {latency[baseline] / latency[fastest]:.2f} times float32's speed")
    for name in forms:
        print(f"    {make_claim(measured[baseline], measured[name]).sentence(name, baseline)}")
    wrong = []
    for run in runs:
        name = names[run.bundle]
        speed, share = latency[baseline] / latency[name], latency[name] / latency[int8[run.chosen["threads"]]]
        bad = speed < LEAST_SPEED if run.code == 0 else share > MOST_LATENCY
        wrong += [run] if bad else []
        print(
            f"      {run.load} loops, exit {run.code}{', WRONG' * bad}: {name}: {speed:.2f} times float32's speed, "
            f"{share:.2f} times the latency of the fastest int8 form; took {run.took_s:.0f} s"
        )
    kept = [run for run in runs if run.code == 11]
    verdict(
        f"{sum(r.code == 0 for r in wrong)} of {len(runs) - len(kept)} with exit 0 are slow",
        not any(run.code == 0 for run in wrong),
        "none",
    )
    verdict(
        f"{sum(r.code == 11 for r in wrong)} of {len(kept)} with exit 11 are not the fastest",
        not any(run.code == 11 for run in wrong),
        "none",
    )
    return {
        "latency_ms": latency,
        "runs": [{"code": r.code, "load": r.load, "form": names[r.bundle], "took_s": r.took_s} for r in runs],
        "wrong": len(wrong),
    }


def main() -> None:
    """Run the chosen models, then print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME", default=("kws", "vww"), help="names of cases")
    parser.add_argument("--runs", type=int, default=10, help="runs of each model with each load")
    parser.add_argument("--loads", type=int, nargs="+", default=(0, 1), help="numbers of busy loops")
    parser.add_argument("--budget", default="60s", help="budget of each run of edgeq tune")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    root = required_data()
    print(f"onnxruntime {onnxruntime.__version__}, {options.runs} runs with each of {options.loads} loops")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(root, Path(folder) / "halves"):
            if case.name not in options.models:
                continue
            print(f"\n{case.name}", flush=True)
            workdir = Path(folder) / case.name
            workdir.mkdir()
            runs = []
            for load in options.loads:
                for number in range(options.runs):
                    runs.append(tune(case, workdir / f"{load}-{number}", load, options.budget))
                    print(f"      {load} loops: {runs[-1].record['verdict'][0]}", flush=True)
            results[case.name] = judge(case, runs, workdir)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
