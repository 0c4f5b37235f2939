"""Kernels of plug-in engines that add two products in 16 bits, against edgeq's model of them, to the last bit.

`scripts/benchmark engine_saturation [--layers N] [--seed N]` runs 100 random layers each of MatMul and Conv, at each
level of the instruction set below VNNI to which the engine can be capped. "plain": no groups, padding or strides, at
most 256 products in a MatMul; "small": weights of at most 64, which no kernel saturates on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the random layers are those of the tests

from edgeq.engines import load_engines
from tests.emulate.saturation.engine_layers import compare, saturating_levels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for engine in load_engines().values():
        for environment in saturating_levels(engine):
            for op in ("MatMul", "Conv"):
                where = " ".join(f"{key}={value}" for key, value in environment.items())
                for kind in ({"plain": True}, {}, {"small": True}):
                    wrong = compare(engine, environment, op, given.layers, given.seed, **kind)
                    what = f"{op} {next(iter(kind), 'any')}"
                    print(
                        f"{engine.name} {where} {what}: {given.layers - len(wrong)} of {given.layers} to the last bit"
                    )
                    print("\n".join(f"  {line}" for line in wrong), end="\n" if wrong else "", flush=True)


if __name__ == "__main__":
    main()
