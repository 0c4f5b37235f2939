"""Check the speeds that `edgeq quantize` and `edgeq tune` claim or estimate on a busy machine against those on a quiet
machine.

    python benchmarks/busy.py [--models NAME ...] [--runs N] [--loops N] [--only quantize tune estimators]
                              [--budget TIME] [--json FILE]

Start the benchmark on a quiet machine. It first measures the quiet ratio, which is the speed of int8 relative to
float32 on the quiet machine. Then it does the runs while busy loops run. For `tune`, it instead stops the loops after
each run and measures the quiet ratio then, because every run may choose a different candidate.

A run is right if the quiet ratio is in the interval that the run claims, or in the spread that it estimates. A run is
wrong if it calls a slower model faster, or a faster model slower. An estimate is wrong only if, in addition, the quiet
ratio shows a difference of more than a tenth.

`estimators` compares ways to estimate the speed. All of them use the same runs, and widen their spread by the same
factor. With EDGEQ_NICE=-20, edgeq has priority over the loops if the system permits it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from contenders import edgeq_json
from edgeq_device.measure.claim import ESTIMATE_ALLOWANCE, Claim, compute_ratio, make_claim
from edgeq_device.measure.latency import Distribution, WarmUp, measure_interleaved, percentile, warm_up_all
from models import resnet50_shaped
from tasks import required_data
from tune_cases import Case, cases
from tuned import tune, verdict

from edgeq.measure.loaded_model import open_model
from edgeq.measure.timed_model import count_sessions
from edgeq.run.session import SessionSettings, open_session

SESSIONS, QUIET_S = 12, 6.0
ESTIMATED_S = 1.0
HELD_BAR, INSIDE_BAR = 0.9, 0.8
CLEARLY = 1.1
Runner = Callable[[], object]
Feed = dict[str, Any]
Reduce = Callable[[np.ndarray], float]
Estimates = tuple[float | None, dict[str, list[tuple[float, float, float]]]]
PARTS = 8
"""Number of parts into which the runs of a single session are divided."""
ESTIMATORS: dict[str, tuple[str, Reduce]] = {
    f"{title} {of.replace('_', ' ')}": (of, reduce)
    for of in ("latency", "processor_time")
    for title, reduce in (
        ("mean", np.mean),
        ("median", np.median),
        ("10th percentile of", lambda times: percentile(np.sort(times), 0.1)),
        ("shortest", np.min),
    )
}
"""Title → the recorded times that an estimator uses, and the function that reduces a session's times to one number."""


class Recorded:
    """Record the duration of each run of a session in seconds, as wall-clock time and as processor time."""

    def __init__(self, run: Runner) -> None:
        self._run = run
        self.latency: list[float] = []
        self.processor_time: list[float] = []

    def __call__(self) -> None:
        spent, start = time.process_time(), time.perf_counter()
        self._run()
        self.latency.append(time.perf_counter() - start)
        self.processor_time.append(time.process_time() - spent)

    def forget(self) -> None:
        """Drop the times recorded during the warm-up."""
        self.latency.clear()
        self.processor_time.clear()


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Run processes that only compute. Each has its own process session, so that they share the cores the way other
    users' processes do.
    """
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def quiet(float32: Sequence[Runner], int8: Sequence[Runner]) -> Claim:
    """Return the speed of int8 relative to float32 without busy loops, from many sessions and long runs."""
    measured = measure_interleaved(
        {"float32": float32, "int8": int8}, min_duration_s=QUIET_S, patience_s=4 * QUIET_S, warmup=WarmUp()
    )
    return make_claim(measured["float32"], measured["int8"])


def runners(model: Path, settings: SessionSettings, feed: Feed, count: int = SESSIONS) -> list[Runner]:
    """Return runners for `count` sessions of one file."""
    return [partial(open_session(model, settings).run, None, feed) for _ in range(count)]


def judge(name: str, pairs: Sequence[tuple[Claim, Claim]]) -> dict[str, Any]:
    """Count the right and wrong claims among pairs of (quiet, claimed), print the counts, and return them."""
    known = [(reference.estimate, found) for reference, found in pairs if reference.estimate is not None]
    runs, answered = len(known), 0
    report = {}
    for kind, bar, slack in (("claim", HELD_BAR, 1.0), ("estimate", INSIDE_BAR, CLEARLY)):
        said = [(t, f.interval if kind == "claim" else f.estimated) for t, f in known]
        given = [(truth, found) for truth, found in said if found is not None]
        inside = sum(low <= truth <= high for truth, (_, low, high) in given)
        wrong = sum((low > 1 and truth * slack < 1) or (high < 1 and truth > slack) for truth, (_, low, high) in given)
        answered += len(given)
        report[kind] = {"given": len(given), "inside": inside, "wrong": wrong}
        if given:
            held = f"{name}: of {len(given)} {kind}s {inside} contain the quiet ratio"
            verdict(held, inside >= bar * len(given), f"{bar:.0%}")
            verdict(f"{wrong} have the wrong direction", not wrong, "none")
    verdict(f"{name}: {answered} of {runs} runs give an answer", answered == runs, "all")
    if len(known) < len(pairs):
        print(f"    {len(pairs) - len(known)} runs not judged: the machine was not quiet enough for a reference")
    return {
        "runs": [{"quiet": reference.to_dict(), "claimed": found.to_dict()} for reference, found in pairs],
        **report,
    }


def estimate(sides: Sequence[Sequence[Recorded]], field: str, reduce: Reduce) -> tuple[float, float, float]:
    """Return the estimate that one of `ESTIMATORS` makes from a measurement, and the spread of the estimate."""
    reduced = []
    for sessions in sides:
        times = [np.array(getattr(one, field)) for one in sessions]
        times = times if len(times) > 1 else np.array_split(times[0], PARTS)
        reduced.append(Distribution(np.array([reduce(each) for each in times if each.size])))
    found = compute_ratio(*reduced)
    count = found.pairs
    about = np.exp(np.log(reduced[0].samples_ms[:count] / reduced[1].samples_ms[:count]).mean())
    return float(about), found.low / ESTIMATE_ALLOWANCE, found.high * ESTIMATE_ALLOWANCE


def run_estimators(model: Path, int8: Path, settings: SessionSettings, feed: Feed, runs: int, loops: int) -> Estimates:
    """Return the quiet ratio, and the results of each estimator keyed by title. All estimators use the same runs, made
    while busy loops run.
    """
    count = count_sessions(model)
    files = {"float32": (model, SessionSettings()), "int8": (int8, settings)}
    reference = quiet(*(runners(*file, feed, count) for file in files.values()))
    print(f"    quiet: {reference.sentence('int8', 'float32')}", flush=True)
    found: dict[str, list[tuple[float, float, float]]] = {title: [] for title in ESTIMATORS}
    with busy(loops):
        for _ in range(runs):
            sides = {name: [Recorded(run) for run in runners(*file, feed, count)] for name, file in files.items()}
            warm_up_all(sides.values(), WarmUp(window=3, min_s=0.1, max_s=0.5), time.perf_counter)
            for session in (one for own in sides.values() for one in own):
                session.forget()
            measure_interleaved(sides, min_duration_s=ESTIMATED_S, min_runs=6)
            for title, how in ESTIMATORS.items():
                found[title].append(estimate(list(sides.values()), *how))
    return reference.estimate, found


def compare_estimators(found: Mapping[str, Estimates]) -> None:
    """Print the errors of each estimator over all models."""
    for title in ESTIMATORS:
        by_model = [(truth, runs[title]) for truth, runs in found.values() if truth is not None]
        held = [[low <= truth <= high for _, low, high in runs] for truth, runs in by_model]
        flat = [(truth, *one) for truth, runs in by_model for one in runs]
        error = math.sqrt(sum(math.log(about / truth) ** 2 for truth, about, *_ in flat) / len(flat))
        wrong = sum(low > 1 and truth * CLEARLY < 1 for truth, _, low, _ in flat)
        width = float(np.median([high / low for *_, low, high in flat]))
        print(
            f"  {title:34} error {error:.1%}, inside {sum(map(sum, held)) / len(flat):.0%}, worst model "
            f"{min(sum(one) / len(one) for one in held):.0%}, wrong {wrong}, upper over lower end {width:.2f}"
        )


def quantize_command(case: Case, workdir: Path) -> tuple[str, ...]:
    """Return the command line that quantizes a case."""
    counted = ["--count", str(case.count)] if case.count else []
    data = ["--data", str(case.data), "--preprocess", str(case.preprocess), *counted]
    return ("quantize", str(case.model), *data, "-o", str(workdir / "int8.onnx"), "-q", "--force")


def run_quantize(case: Case, workdir: Path, runs: int, loops: int) -> dict[str, Any]:
    """Check the claims in the proofs of `edgeq quantize`."""
    command = quantize_command(case, workdir)
    settings = SessionSettings(config=edgeq_json(*command, "--no-timing")["session_options"])
    feed = dict(next(iter(case.open(case.data, 1))).inputs)
    reference = quiet(runners(case.model, SessionSettings(), feed), runners(workdir / "int8.onnx", settings, feed))
    print(f"    quiet: {reference.sentence('int8', 'float32')}", flush=True)
    if reference.interval is None:
        return judge("quantize", [(reference, Claim())] * runs)
    with busy(loops):
        found = [Claim.from_record(edgeq_json(*command)["speed"]["ratio"]) for _ in range(runs)]
    for one in found:
        print(f"      {one.sentence('int8', 'float32')}")
    return judge("quantize", [(reference, one) for one in found])


def run_tune(case: Case, workdir: Path, runs: int, loops: int, budget: str) -> dict[str, Any]:
    """Check the claims of `edgeq tune` about its chosen candidate. A run that chooses no candidate makes no claim."""
    feed = dict(next(iter(case.open(case.data, 1))).inputs)
    pairs = []
    for i in range(runs):
        bundle = workdir / f"tuned {i}"
        try:
            with busy(loops):
                record = tune(case, bundle, ["--budget", budget])
        except SystemExit as error:  # no candidate qualified, or no speed could be claimed
            print(f"      nothing chosen: {str(error)[-160:]}", flush=True)
            pairs.append((Claim(1.0), Claim(reason="nothing was chosen")))
            continue
        chosen = next(c for c in record["candidates"] if c["name"] == record["chosen"])
        found = Claim.from_record(chosen["timing"]["speedup"])
        float32 = runners(case.model, SessionSettings(intra_op_threads=record["float32"]["threads"]), feed)
        with ExitStack() as opened:
            settings = SessionSettings(intra_op_threads=chosen["threads"])
            bundles = [opened.enter_context(open_model(bundle, settings)) for _ in range(SESSIONS)]
            reference = quiet(float32, [partial(one.session.run, None, feed) for one in bundles])
        pairs.append((reference, found))
        print(f"      {found.sentence(chosen['name'], 'float32')}", flush=True)
        print(f"        quiet: {reference.sentence('it', 'float32')}; took {record['elapsed_s']:.0f} s of {budget}")
    return judge("tune", pairs)


def main() -> None:
    """Run the chosen sections on all models, then print and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="cases whose names begin with these")
    parser.add_argument("--runs", type=int, default=10, help="runs next to busy loops, for each model and command")
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=("quantize", "tune", "estimators"), default=("quantize", "tune"))
    parser.add_argument("--budget", default="60s", help="budget of each run of edgeq tune")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    root = required_data()
    print(f"onnxruntime {onnxruntime.__version__}, {options.runs} runs next to {options.loops} loops")
    results: dict[str, Any] = {}
    estimates: dict[str, Estimates] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(cases(root, Path(folder) / "halves")):
            if options.models and not any(case.name.startswith(name) for name in options.models):
                continue
            workdir = Path(folder) / str(i)
            workdir.mkdir()
            print(f"\n{case.name}", flush=True)
            found = results[case.name] = {}
            if "estimators" in options.only:
                settings = SessionSettings(
                    config=edgeq_json(*quantize_command(case, workdir), "--no-timing")["session_options"]
                )
                feed = dict(next(iter(case.open(case.data, 1))).inputs)
                files = case.model, workdir / "int8.onnx", settings
                estimates[case.name] = run_estimators(*files, feed, options.runs, options.loops)
            if "quantize" in options.only:
                found["quantize"] = run_quantize(case, workdir, options.runs, options.loops)
            if "tune" in options.only:
                found["tune"] = run_tune(case, workdir, options.runs, options.loops, options.budget)
        if "estimators" in options.only and not options.models:
            print("\nResNet-50-shaped", flush=True)
            model, images = resnet50_shaped(Path(folder) / "large.onnx"), Path(folder) / "images.npy"
            np.save(images, np.random.default_rng(0).standard_normal((8, 3, 224, 224)).astype(np.float32))
            built = Path(folder) / "large-int8.onnx"
            quantized = edgeq_json("quantize", str(model), "--data", str(images), "-o", str(built), "-q", "--no-timing")
            settings = SessionSettings(config=quantized["session_options"])
            feed = {"input": np.load(images)[:1]}
            estimates["large"] = run_estimators(model, built, settings, feed, options.runs, options.loops)
    if estimates:
        compare_estimators(estimates)
        results["estimators"] = estimates
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
