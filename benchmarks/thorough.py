"""Check whether `edgeq tune` finds the same candidate with its shortcuts as without them. The benchmark compares the
search with `edgeq tune --thorough`.

    python benchmarks/thorough.py [--only NAME ...] [--json FILE]

Both searches must choose the same candidate, or two candidates that cannot be distinguished. This means that
interleaved timings do not show either one to be more than 3 % faster, and that the loss of each is in the 95 % interval
of the other. If one search ends without a bundle, the other must also end without one.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from edgeq_device.measure.claim import SettlingRules, make_claim, rank_until_settled
from edgeq_device.measure.latency import WarmUp
from edgeq_device.measure.scenarios import make_runner
from tasks import required_data
from tune_cases import Case, chosen
from tuned import timed, tune, verdict, winner

from edgeq.measure.loaded_model import open_model

SEARCHES: Mapping[str, tuple[str, ...]] = {"shortcuts": (), "thorough": ("--thorough",)}
TIE = 1.03


def alike(case: Case, bundles: Mapping[str, Path], winners: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    """Compare the two chosen candidates. Return the comparison as text, and whether they cannot be distinguished."""
    feed = dict(next(iter(case.open(case.judged_on, 1))).inputs)
    with ExitStack() as stack:
        sessions = {name: stack.enter_context(open_model(bundle)).session for name, bundle in bundles.items()}
        runners = {name: make_runner(session, [feed]) for name, session in sessions.items()}
        ranking = rank_until_settled(runners, SettlingRules(max_duration_s=20, tie=0.005), warmup=WarmUp(max_s=2))
    estimate, low, high = make_claim(*(ranking.distributions[name] for name in SEARCHES)).interval or (
        0.0,
        0.0,
        math.inf,
    )
    first, second = (winners[name]["accuracy"] for name in SEARCHES)
    said = f"thorough is {estimate:.2f} times as fast ({low:.2f} to {high:.2f})" if low else "no speed can be claimed"
    said += f", and loses {100 * second['drop']:.2f} points, the other {100 * first['drop']:.2f}"
    as_fast = low <= TIE and high >= 1 / TIE
    as_accurate = all(a["low"] <= b["drop"] <= a["high"] for a, b in ((first, second), (second, first)))
    return said, as_fast and as_accurate


def run_case(case: Case, workdir: Path) -> dict[str, Any]:
    """Run both searches for a case, and compare the chosen candidates."""
    print(f"\n{case.name}", flush=True)
    bundles = {name: workdir / name for name in SEARCHES}
    records = {name: timed(partial(tune, case, bundles[name], options)) for name, options in SEARCHES.items()}
    for name, record in records.items():
        print(f"    {name}: {record['took_s']:.0f} s; {record['verdict'][0]}", flush=True)
    names = {record.get("chosen") for record in records.values()}
    ended = ["ended" in record for record in records.values()]
    if len(names) == 1:
        text, same = "both end without a bundle" if ended[0] else f"both chose {names.pop()}", True
    elif any(ended):
        text, same = "one of them ends without a bundle", False
    else:
        text, same = alike(case, bundles, {name: winner(record) for name, record in records.items()})
    verdict(text, same, "the same, or indistinguishable")
    return {**records, "compared": text, "same": same}


def main() -> None:
    """Run the chosen cases, then print and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose names begin with these")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    root = required_data()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, workdir in chosen(root, Path(folder), options.only or ()):
            results[case.name] = run_case(case, workdir)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
