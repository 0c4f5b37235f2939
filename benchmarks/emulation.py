"""Check the limits for emulated machines: their setup, masking compared with qemu, and ARM64 bundles on ARM64 kernels.

    python benchmarks/emulation.py [--only SECTION ...] [--images N] [--models N] [--json FILE]

Sections:
- setup: make a new ARM64 machine in an empty cache.
- masking: run random integer models on this CPU, masked to AVX2, and compare with an emulated Haswell.
- arm64: package mobilenet_v1_0.25, resnet20 and yolox_nano of shared/data for two boards, one with dot-product
  instructions and one without. Load each bundle there, run its self-test, and compare its accuracy on N images with
  that on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from integer_models import random_model
from tasks import REPOSITORY, shared_data

from edgeq.emulate.emulator import load_emulators
from edgeq.emulate.machine import build_command
from edgeq.emulate.routes import build_masked_command
from edgeq.run.session import SessionSettings, start_guest

SECONDS_BAR, MEGABYTES_BAR, POINTS_BAR = 180.0, 250.0, 0.5
BOARDS = ("raspberry-pi-4", "raspberry-pi-5")
SPECS = REPOSITORY / "benchmarks" / "specs"

Row = tuple[str, str, str, bool]


@dataclass(frozen=True)
class Case:
    """Describe a model of shared/data, and the edgeq options for its data."""

    name: str
    spec: str
    calibration: str
    validation: str
    task: tuple[str, ...]


CASES = (
    Case(
        "mobilenet_v1_0.25_224",
        "mobilenet_v1_0.25_224.toml",
        "imagenet-sample/calib",
        "imagenet-sample/val",
        ("--task", "classification", "--class-offset", "1"),
    ),
    Case(
        "resnet20_cifar10",
        "resnet20_cifar10.toml",
        "cifar10/calib_lossless_300.npz",
        "cifar10/test_lossless_249.npz",
        ("--task", "classification"),
    ),
    Case(
        "yolox_nano",
        "yolox_nano.toml",
        "coco256/calib",
        "coco256/val",
        ("--task", "detection", "--decoder", "yolox", "--annotations", "coco256/instances_val.json"),
    ),
)


def setup(arguments: argparse.Namespace) -> Iterator[Row]:
    """Run `edgeq emulate setup arm64` with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        before, start = os.times(), time.perf_counter()
        _edgeq("emulate", "setup", "arm64", XDG_CACHE_HOME=cache)
        seconds = time.perf_counter() - start
        after = os.times()
        busy = sum(after[2:4]) - sum(before[2:4])
        size = sum(p.stat().st_size for p in Path(cache).rglob("*") if p.is_file() and not p.is_symlink()) / 1e6
    said = f"{seconds:.0f} s ({busy:.0f} s of them computing)"
    yield "emulate setup arm64, time", f"under {SECONDS_BAR:.0f} s", said, seconds < SECONDS_BAR
    yield "emulate setup arm64, size", f"under {MEGABYTES_BAR:.0f} MB", f"{size:.0f} MB", size < MEGABYTES_BAR


def masking(arguments: argparse.Namespace) -> Iterator[Row]:
    """Run the same models on this CPU without AVX-512 and on an emulated Haswell."""
    equal, saturated, settings = 0, 0, SessionSettings(intra_op_threads=1)
    haswell = build_command(load_emulators()["x86_64"], "Haswell")
    with (
        tempfile.TemporaryDirectory() as folder,
        start_guest(build_masked_command(("avx512f", "avx_vnni")), "masked") as left,
        start_guest(haswell, "Haswell") as right,
        start_guest(build_masked_command(()), "this CPU") as here,
    ):
        for seed in range(arguments.models):
            case = random_model(seed)
            file = Path(folder) / f"{seed}.onnx"
            file.write_bytes(case.model)
            one, two, plain = (guest.open(file, settings).run(None, case.inputs)[0] for guest in (left, right, here))
            equal += np.array_equal(one, two)
            saturated += not np.array_equal(one, plain)
    said = f"{equal} of {arguments.models} ({saturated} of them differ from this CPU unmasked)"
    yield "masked to AVX2 equals qemu's Haswell", "every output, to the bit", said, equal == arguments.models


def arm64(arguments: argparse.Namespace) -> Iterator[Row]:
    """Package each model for both boards, and check the bundle on each board's kernels."""
    data = shared_data()
    if data is None:
        print("arm64: skipped, shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
        return
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            bundle = str(Path(folder) / "bundle")
            spec = ("--preprocess", str(SPECS / case.spec))
            model, calibration = str(data / case.name / "model.onnx"), str(data / case.calibration)
            boards = [part for board in BOARDS for part in ("-t", board)]
            _edgeq("package", model, "--data", calibration, *spec, "--no-timing", *boards, "-o", bundle)
            task = [str(data / part) if "/" in part else part for part in case.task]
            samples = ("--data", str(data / case.validation), "--samples", str(arguments.images))
            for board in BOARDS:
                check = _edgeq("verify", bundle, "--on", board, *samples, *spec, *task)["checks"][0]
                yield _row(case.name, board, check)


def _row(name: str, board: str, check: Mapping[str, Any]) -> Row:
    title, bar = f"{name} on {board} ({check['how']})", f"self-test passes, within {POINTS_BAR} point"
    if check["status"] != "passed":
        return title, bar, f"{check['status']}: {check['reason']}", False
    points = 100 * check["accuracy_drop"]
    host, target = (check["accuracy"][place] for place in ("host", "target"))
    values = " and ".join(f"{100 * place['metrics'][place['primary']]:.2f}" for place in (host, target))
    seen = ", ".join(check["kernels"]["instructions"]) or "no dot product"
    said = f"{values} % {host['primary']} on host and target, {check['samples']} samples; kernels: {seen}"
    return title, bar, said, abs(points) <= POINTS_BAR


def _edgeq(*words: str, **environment: str) -> Any:
    """Return a command's JSON output. A failed check is also a result."""
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "edgeq", *words, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    if ran.returncode != 0 and not ran.stdout.strip():
        sys.exit(ran.stderr)
    return json.loads(ran.stdout)


SECTIONS = {"setup": setup, "masking": masking, "arm64": arm64}


def main() -> None:
    """Run the chosen sections, then print and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS), help="sections to run")
    parser.add_argument("--images", type=int, default=100, help="samples for each model and board (default: 100)")
    parser.add_argument("--models", type=int, default=100, help="number of random models (default: 100)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        for row in SECTIONS[name](arguments):
            title, bar, measured, held = row
            print(f"| {title} | {bar} | {measured} | {'ok' if held else 'NOT MET'} |", flush=True)
            rows.append(dict(zip(("what", "bar", "measured", "held"), row, strict=True)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
