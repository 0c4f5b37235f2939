"""Run the fuzzer: `scripts/fuzz [LAYER...]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from edgeq_device.system.budget import confine

from fuzz.guided import guided
from fuzz.layers import Layer, make_seeds
from fuzz.run import LayerCounts, case_of, layers_named, run_case, run_layer, table

SAVED = Path(__file__).resolve().parent.parent / ".fuzz"


def main() -> int:
    """Run layers, or repeat one case. Return 1 if anything was found."""
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description="Read mutated files as edgeq reads untrusted ones."
    )
    parser.add_argument("layers", nargs="*", metavar="LAYER", help="layers to run (default: all)")
    parser.add_argument("--cases", type=int, metavar="N", help="cases of each layer (default: the layer's own number)")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="factor for each layer's own number of cases"
    )
    parser.add_argument("--minutes", type=float, metavar="N", help="time to run; each layer gets an equal part")
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases; the same seed gives the same cases")
    parser.add_argument("--start", type=int, default=0, metavar="N", help="the first case")
    parser.add_argument(
        "--case", type=int, metavar="N", help="run only this case, in this process, and print its traceback"
    )
    parser.add_argument(
        "--guided", action="store_true", help="guide the mutations by coverage, with atheris; needs --minutes"
    )
    given = parser.parse_args()
    chosen = layers_named(tuple(given.layers))
    if given.guided:
        if given.minutes is None:
            parser.error("--guided needs --minutes")
        return max(guided(layer, given.seed, 60 * given.minutes / len(chosen), SAVED) != 0 for layer in chosen)
    if given.case is not None:
        if len(chosen) != 1:
            parser.error("--case needs one LAYER")
        confine("fuzz")  # relay what libraries print, in the same way as in a run
        return _again(chosen[0], given.seed, given.case)
    by_layer: dict[str, LayerCounts] = {}
    for layer in chosen:
        cases = given.cases or max(1, int(layer.cases * given.scale))
        ends = None
        if given.minutes is not None:
            ends = time.monotonic() + 60 * given.minutes / len(chosen)
            cases = given.cases or 1 << 40
        late = (lambda ends=ends: time.monotonic() > ends) if ends is not None else (lambda: False)
        counts = run_layer(layer, given.seed, given.start, cases, SAVED, until=late)
        by_layer[layer.name] = counts
        found = sum(counts.findings.values())
        print(f"{layer.name}: {counts.cases} cases in {counts.seconds:.0f} s, {found} findings", flush=True)
    print(f"\nseed {given.seed}\n\n{table(by_layer)}")
    return int(any(counts.findings for counts in by_layer.values()))


def _again(layer: Layer, seed: int, index: int) -> int:
    with tempfile.TemporaryDirectory(prefix="edgeq-fuzz-") as folder:
        seeds = make_seeds(layer, Path(folder) / "seeds")
        name, content = case_of(layer, seeds, seed, index)
        print(f"{name}: {content[:400]!r}")
        error = run_case(layer, name, content, Path(folder))
    if error is not None:
        traceback.print_exception(error)
    return int(error is not None)


if __name__ == "__main__":
    sys.exit(main())
