"""Measure how much accuracy is lost if labels are missing, by running `edgeq tune` with and without labels on the same
samples.

    python benchmarks/unlabelled.py [--only NAME ...] [--json FILE]

Both bundles are judged with the labels. Without labels, edgeq estimates the loss from the scores that float32 gives to
two classes: the one that it predicts itself, and the one that the candidate predicts (docs/tune.md, Accuracy).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tasks import required_data
from tune_cases import Case, chosen
from tuned import race, tune, verdict

from edgeq.measure.accuracy import evaluate

BAR = 0.005
CASES = ("mobilenet, first half", "resnet20", "kws", "vww")


def run_case(case: Case, workdir: Path) -> dict[str, Any]:
    """Tune a case with and without labels, print both results, and return them."""
    print(f"\n{case.name}")
    task, judged = case.make_task(), case.open(case.judged_on)
    feed = dict(next(iter(judged)).inputs)
    float32 = evaluate(case.model, judged, task)
    lost, results = [], {}
    for name, labels in (("with labels", True), ("without", False)):
        bundle = workdir / name
        record = tune(case, bundle, labels=labels)
        loss = evaluate(bundle, judged, task).loss_against(float32)
        speed = race(case.model, bundle, feed, "float32")
        print(f"    {name}: loses {100 * loss:.2f} points, {speed:.2f} times float32's speed: {record['chosen']}")
        lost.append(loss)
        results[name] = {"loss": loss, "speed": speed, "tune": record}
    apart = lost[1] - lost[0]
    verdict(f"without labels {100 * apart:.2f} points worse", apart <= BAR, f"at most {100 * BAR:.1f}")
    return results


def main() -> None:
    """Run the chosen cases, then print and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=CASES, help="cases whose names begin with these")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    root = required_data()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, workdir in chosen(root, Path(folder), options.only):
            results[case.name] = run_case(case, workdir)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
