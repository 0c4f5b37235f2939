"""Count how often the speed that `edgeq quantize` claims misses what its next runs measure.

    python benchmarks/settled.py [--models NAME ...] [--runs N] [--loops N] [--json FILE]

For each model, the benchmark runs `edgeq quantize` many times, each time in new processes. A settled interval is wrong
if it does not contain the median of the estimates of all runs. Estimates of a busy machine count for this median if no
run settles a speed, and are printed separately. With --loops, that many busy loops run next to edgeq: then no speed
should be settled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
from busy import busy, quantize_command
from contenders import edgeq_json
from edgeq_device.measure.claim import Claim
from tasks import required_data
from tune_cases import Case, cases
from tuned import verdict

MISSES_BAR = 1
DEFAULT = ("kws", "lenet", "mobilenet, first half")


def claims_of(case: Case, workdir: Path, runs: int) -> list[tuple[Claim, float]]:
    """Return the claim and the seconds of each run of `edgeq quantize`."""
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        claim = Claim.from_record(edgeq_json(*quantize_command(case, workdir))["speed"]["ratio"])
        found.append((claim, time.perf_counter() - start))
        print(f"      {claim.sentence('int8', 'float32')} ({found[-1][1]:.1f} s)", flush=True)
    return found


def count_misses(claims: Sequence[Claim]) -> dict[str, Any]:
    """Count the settled intervals that miss the median of all estimates, print the counts, and return them."""
    settled = [claim.interval for claim in claims if claim.interval is not None]
    estimated = [claim.estimated for claim in claims if claim.estimated is not None]
    known = [about for about, *_ in settled or estimated]
    if not known:
        print("    no run gives a speed")
        return {"settled": 0, "estimated": 0}
    median = statistics.median(known)
    missed = sum(not low <= median <= high for _, low, high in settled)
    beside = sum(not low <= median <= high for _, low, high in estimated)
    print(f"    median of {len(known)} estimates: {median:.3f}, from {min(known):.3f} to {max(known):.3f}")
    if settled:
        width = statistics.median(high / low for _, low, high in settled)
        print(f"    upper over lower end of a settled interval: {width:.3f} (median)")
    verdict(f"of {len(settled)} settled intervals, {missed} miss the median", missed <= MISSES_BAR, str(MISSES_BAR))
    print(f"    of {len(estimated)} estimates, {beside} miss it with their spread")
    return {
        "median": median,
        "settled": len(settled),
        "settled_missed": missed,
        "estimated": len(estimated),
        "estimated_missed": beside,
    }


def main() -> None:
    """Run the chosen models, then print and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME", default=DEFAULT, help="names of cases")
    parser.add_argument("--runs", type=int, default=20, help="runs of each model")
    parser.add_argument("--loops", type=int, default=0, help="busy loops next to edgeq")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    root = required_data()
    print(f"onnxruntime {onnxruntime.__version__}, {options.runs} runs, each in new processes")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(root, Path(folder) / "halves"):
            if case.name not in options.models:
                continue
            print(f"\n{case.name}", flush=True)
            with busy(options.loops):
                found = claims_of(case, Path(folder), options.runs)
            seconds = statistics.median(spent for _, spent in found)
            print(f"    a run takes {seconds:.1f} s (median)")
            results[case.name] = {
                **count_misses([claim for claim, _ in found]),
                "seconds": seconds,
                "claims": [claim.to_dict() for claim, _ in found],
            }
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
