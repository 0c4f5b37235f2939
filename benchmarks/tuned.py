"""Provide functions that the benchmarks of `edgeq tune` share. The functions run `edgeq tune` as a user does, time the
bundle that it writes, and check a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders import edgeq_json
from edgeq_device.measure.claim import SettlingRules, compute_ratio, rank_until_settled
from edgeq_device.measure.latency import WarmUp
from edgeq_device.measure.scenarios import make_runner
from tune_cases import Case

from edgeq.measure.loaded_model import open_model
from edgeq.run.session import SessionSettings, open_session


def tune(case: Case, bundle: Path, options: Sequence[str] = (), *, labels: bool = True) -> dict[str, Any]:
    """Write the tuned bundle of `case` to `bundle`, and return the record of the run.

    Args:
        options: additional options for the command line.
        labels: whether tuning sees the labels of its samples.
    """
    data = ["--data", str(case.data), "--val", str(case.tuned_on), *case.preprocessing]
    counted = ["--count", str(case.count)] if case.count else []
    task = case.options if labels else ()
    return edgeq_json(
        *("tune", str(case.model), *data, *counted, *task, "--max-drop", case.max_drop, "-o", str(bundle)),
        *(*options, "--no-memory", "-q"),
    )


def timed(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the record of a tuning run, or the reason why it ended without a bundle. `took_s` is the time of the
    command in seconds.
    """
    start = time.perf_counter()
    try:
        record = run()
    except SystemExit as error:
        record = {"ended": str(error), "verdict": [str(error)]}
    return {**record, "took_s": time.perf_counter() - start}


def winner(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the candidate that tuning chose. If tuning ended without a bundle, return float32 in onnxruntime's own
    kernels.
    """
    if "ended" in record:
        return {"engine": "onnxruntime", "precision": "f32", "threads": 0}
    found: dict[str, Any] = next(c for c in record["candidates"] if c["name"] == record["chosen"])
    return found


def race(model: Path, bundle: Path, feed: Mapping[str, Any], name: str) -> float:
    """Return the speed of `bundle` as a multiple of the speed of `model`. `model` runs with the number of threads that
    suits it best.
    """
    threads = {
        f"{name}, {n or 'all'} threads": open_session(model, SessionSettings(intra_op_threads=n)) for n in (0, 1)
    }
    with open_model(bundle) as loaded:
        sessions = {**threads, "tuned": loaded.session}
        runners = {key: make_runner(session, [feed]) for key, session in sessions.items()}
        ranking = rank_until_settled(runners, SettlingRules(max_duration_s=20, tie=0.005), warmup=WarmUp(max_s=2))
    measured = ranking.distributions
    best = min(threads, key=lambda key: measured[key].p50)
    return float(compute_ratio(measured[best], measured["tuned"]).estimate)


def verdict(text: str, met: bool, bar: str) -> None:
    """Print a figure with its limit, and whether the limit is met."""
    print(f"  {'met   ' if met else 'MISSED'} {text} (bar: {bar})", flush=True)
