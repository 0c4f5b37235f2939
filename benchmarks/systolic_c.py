"""Compare the simulator of the systolic array with the C bundle, and count the values that differ in every layer's
output.

    python benchmarks/systolic_c.py [--graphs 200] [--images 2]

The models are the demo and those of shared/data. They are compiled for riscv64 with both generations of gemmini.h, and
run under qemu-riscv64. The random graphs are compiled for this machine, each with one of the two generations. All of
them run in every mode (ws, ws with products for convolutions, cpu, os).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tasks import shared_data  # noqa: E402

from edgeq.backends.systolic.emit_c.builder import Generation  # noqa: E402
from edgeq.backends.systolic.emit_c.bundle import CBundle, write_c_bundle  # noqa: E402
from edgeq.backends.systolic.program import Program  # noqa: E402
from tests.backends.systolic.emit_c.programs import (  # noqa: E402
    MODES,
    Arrays,
    differing,
    model_cases,
    program_of,
    random_program,
)

BAR = 0


def compared(bundle: CBundle, program: Program, inputs: Arrays, binary: list[str]) -> tuple[int, int]:
    """Return the number of values that differ and the number of all values, over all layers and modes."""
    wrong = values = 0
    for mode, how in MODES.items():
        file = bundle.directory / "layers.bin"
        file.unlink(missing_ok=True)
        subprocess.run([*binary, *mode, "dump"], cwd=bundle.directory, capture_output=True, check=False)
        dump = file.read_bytes()
        wrong += sum(differing(bundle, program, inputs, dump, **how).values())
        values += len(dump)
    return wrong, values


def models(images: int) -> int:
    """Print a row for each model, and return the largest number of differing values."""
    shared = shared_data()
    worst = 0
    for name, (model, data, spec) in model_cases(shared).items():
        with tempfile.TemporaryDirectory() as folder:
            program, samples = program_of(model, str(data), preprocess=spec, count=max(8, images))
            inputs = {key: values[:images] for key, values in samples.items()}
            wrong = values = 0
            for generation in ("2021", "2023"):
                bundle = write_c_bundle(program, inputs, Path(folder) / generation, generation=generation)
                subprocess.run(["make", "-s", "linux"], cwd=bundle.directory, check=True)
                more, of = compared(bundle, program, inputs, ["qemu-riscv64", "./net-linux"])
                wrong, values = wrong + more, values + of
        row(f"{name}, {images} images, qemu-riscv64", wrong, values)
        worst = max(worst, wrong)
    return worst


def graphs(count: int) -> int:
    """Print a row for `count` random graphs, and return the number of differing values."""
    wrong = values = 0
    for seed in range(count):
        with tempfile.TemporaryDirectory() as folder:
            program, inputs = random_program(seed, Path(folder))
            generation: Generation = "2021" if seed // 4 % 2 else "2023"
            bundle = write_c_bundle(program, inputs, Path(folder) / "c", generation=generation)
            subprocess.run(["make", "-s", "host", "CFLAGS=-O0"], cwd=bundle.directory, check=True)
            more, of = compared(bundle, program, inputs, ["./net-host"])
            wrong, values = wrong + more, values + of
    row(f"{count} random graphs, this machine", wrong, values)
    return wrong


def row(what: str, wrong: int, values: int) -> None:
    """Print a row with the number of differing values, the number of all values, and whether the limit is met."""
    print(f"| {what} | {BAR} | {wrong} of {values} | {'met' if wrong <= BAR else 'MISSED'} |", flush=True)


def main() -> int:
    """Print the table, and return 1 if a value differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--images", type=int, default=2)
    options = parser.parse_args()
    print("| simulator against C, every layer output | bar | differing values | |\n|---|---|---|---|")
    worst = max(models(options.images), graphs(options.graphs))
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
