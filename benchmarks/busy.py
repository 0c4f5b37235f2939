"""What `edgeq quantize` and `edgeq tune` claim of speed on a busy machine, held against the ratio on a quiet one.

    python benchmarks/busy.py [--models NAME ...] [--runs N] [--loops N] [--only quantize tune] [--budget TIME]
                              [--json FILE]

Start it on a quiet machine. The quiet ratio is measured before the runs beside busy loops, for `tune` after each of
them with the loops stopped, since every run may choose another candidate. A run holds if the quiet ratio lies in the
interval that it claims, or if it claims nothing. To call something faster that is slower, or the reverse, is wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
from contenders import edgeq_json
from edgeq_device.claim import FASTER, SLOWER, Claim, claim
from edgeq_device.latency import WarmUp, measure_interleaved
from tasks import required_data
from tune_cases import Case, cases
from tuned import tune, verdict

from edgeq.measure.bench import open_model
from edgeq.run.session import SessionSettings, open_session

SESSIONS, QUIET_S = 12, 6.0
HELD_BAR = 0.9
Runner = Callable[[], object]


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def quiet(float32: Sequence[Runner], int8: Sequence[Runner]) -> Claim:
    """The ratio without loops: many sessions, for long."""
    measured = measure_interleaved(
        {"float32": float32, "int8": int8}, min_duration_s=QUIET_S, patience_s=4 * QUIET_S, warmup=WarmUp()
    )
    return claim(measured["float32"], measured["int8"])


def runners(model: Path, settings: SessionSettings, feed: dict[str, Any]) -> list[Runner]:
    """Sessions of a file."""
    return [partial(open_session(model, settings).run, None, feed) for _ in range(SESSIONS)]


def judge(name: str, pairs: Sequence[tuple[Claim, Claim]]) -> dict[str, Any]:
    """Count what (quiet, claimed) come to, print it, and give it."""
    known = [(reference.estimate, found) for reference, found in pairs if reference.estimate is not None]
    claimed = [(truth, found, found.interval) for truth, found in known if found.interval is not None]
    inside = sum(interval[1] <= truth <= interval[2] for truth, _, interval in claimed)
    wrong = sum(found.verdict == (SLOWER if truth > 1 else FASTER) for truth, found, _ in claimed)
    held, runs = inside + len(known) - len(claimed), len(known)
    print(f"    {name}: of {runs} runs {len(claimed)} claim a speed; {inside} of the claims hold the quiet ratio")
    verdict(f"{held} of {runs} hold it or claim nothing", held >= HELD_BAR * runs, f"{HELD_BAR:.0%}")
    verdict(f"{wrong} are the wrong way round", not wrong, "none")
    if len(known) < len(pairs):
        print(f"    {len(pairs) - len(known)} runs not judged: the machine was not quiet enough for a reference")
    return {
        "runs": [{"quiet": reference.to_dict(), "claimed": found.to_dict()} for reference, found in pairs],
        "claims": len(claimed),
        "inside": inside,
        "wrong": wrong,
    }


def run_quantize(case: Case, workdir: Path, runs: int, loops: int) -> dict[str, Any]:
    """`edgeq quantize`, by its proof."""
    counted = ["--count", str(case.count)] if case.count else []
    data = ["--data", str(case.data), "--preprocess", str(case.preprocess), *counted]
    command = ("quantize", str(case.model), *data, "-o", str(workdir / "int8.onnx"), "-q", "--force")
    settings = SessionSettings(config=edgeq_json(*command, "--no-timing")["session_options"])
    feed = dict(next(iter(case.open(case.data, 1))).inputs)
    reference = quiet(runners(case.model, SessionSettings(), feed), runners(workdir / "int8.onnx", settings, feed))
    print(f"    quiet: {reference.sentence('int8', 'float32')}", flush=True)
    if reference.interval is None:
        return judge("quantize", [(reference, Claim())] * runs)
    with busy(loops):
        found = [Claim.read(edgeq_json(*command)["speed"]["ratio"]) for _ in range(runs)]
    for one in found:
        print(f"      {one.sentence('int8', 'float32')}")
    return judge("quantize", [(reference, one) for one in found])


def run_tune(case: Case, workdir: Path, runs: int, loops: int, budget: str) -> dict[str, Any]:
    """`edgeq tune`, by the record of what it chose. A run that chooses nothing claims nothing."""
    feed = dict(next(iter(case.open(case.data, 1))).inputs)
    pairs = []
    for i in range(runs):
        bundle = workdir / f"tuned {i}"
        try:
            with busy(loops):
                record = tune(case, bundle, ["--budget", budget])
        except SystemExit as error:  # nothing qualified, or nothing could be claimed
            print(f"      nothing chosen: {str(error)[-160:]}", flush=True)
            pairs.append((Claim(1.0), Claim(reason="nothing was chosen")))
            continue
        chosen = next(c for c in record["candidates"] if c["name"] == record["chosen"])
        found = Claim.read(chosen["timing"]["speedup"])
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="cases whose name begins so")
    parser.add_argument("--runs", type=int, default=10, help="beside busy loops, for each model and command")
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=("quantize", "tune"), default=("quantize", "tune"))
    parser.add_argument("--budget", default="60s", help="for each run of edgeq tune")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    root = required_data()
    print(f"onnxruntime {onnxruntime.__version__}, {options.runs} runs beside {options.loops} loops")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(cases(root, Path(folder) / "halves")):
            if options.models and not any(case.name.startswith(name) for name in options.models):
                continue
            workdir = Path(folder) / str(i)
            workdir.mkdir()
            print(f"\n{case.name}", flush=True)
            found = results[case.name] = {}
            if "quantize" in options.only:
                found["quantize"] = run_quantize(case, workdir, options.runs, options.loops)
            if "tune" in options.only:
                found["tune"] = run_tune(case, workdir, options.runs, options.loops, options.budget)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
