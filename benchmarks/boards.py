"""Measure the cost of measuring over SSH. In pairs of runs, the benchmark compares `edgeq bench --on` with the same
measurement started by hand on the board. It also counts the bytes that a second run sends.

With `--cuts N`, the benchmark instead does N runs of a small `edgeq tune --on`. It cuts the connection once in each
run, at a point between the first request and the last but one, and then resumes the run.

    python benchmarks/boards.py [--model FILE.onnx] [--runs N] [--duration S] [--arm64] [--cuts N] [--json FILE]

The boards are sshd servers on this machine, each with its own home folder. `--arm64` adds a board whose Python runs in
the emulated ARM64 machine that `edgeq emulate setup arm64` makes. The benchmark needs openssh-server and, without
`--cuts`, a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from contenders import edgeq_json
from gate import CHANNELS, LAYERS, SIZE, chain

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # start sshd as the tests do

from edgeq.emulate.emulator import find_emulator
from edgeq.emulate.machine import build_command
from edgeq.emulate.sysroot import load_sysroot
from edgeq.errors import BoardError
from tests.remote.sshd import Network, Sshd, children
from tests.remote.tuning import cut_at, models, steady_boards, tuned

MOST_OVERHEAD, MOST_SENT = 0.03, 0.01
CPU, EMULATED = "cortex-a76", "arm64"


def main() -> int:
    """Measure and print the figures, and return 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", type=Path, help="float32 model (default: a generated chain of convolutions)")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--duration", type=float, default=1.0)
    parser.add_argument("--arm64", action="store_true")
    parser.add_argument("--cuts", type=int, metavar="N")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        network = Network(Path(folder))
        os.environ["PATH"] = f"{network.programs}{os.pathsep}{os.environ['PATH']}"
        try:
            if given.cuts:
                return cut_short(network.start("one", f'exec {shlex.quote(sys.executable)} "$@"'), given)
            if given.model is None:
                given.model, given.data = made(Path(folder))
            found = [measured(started(network, *named), given) for named in pythons(given)]
        finally:
            network.end()
    for row in found:
        print(
            f"{row['board']} ({row['architecture']}): {row['variant']}, p50 over SSH {100 * row['overhead']:+.1f} % "
            f"of by hand (median of {len(row['over_ms'])} pairs, the middle half {100 * row['middle'][0]:+.1f} to "
            f"{100 * row['middle'][1]:+.1f} %; bar {100 * MOST_OVERHEAD:.0f} %); "
            f"the second run sends {100 * row['sent_again']:.2f} % ({row['bytes']} bytes, bar {100 * MOST_SENT:.0f} %)"
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))
    native = [row for row in found if row["board"] != EMULATED]
    held = all(abs(row["overhead"]) <= MOST_OVERHEAD for row in native)
    return 0 if held and all(row["sent_again"] < MOST_SENT for row in found) else 1


def cut_short(board: Sshd, given: argparse.Namespace) -> int:
    """Cut the connection at several points of a run, and return 1 if a run is not clean.

    A run is clean if it ends with one line, if the resumed run gives the same bundle, and if afterwards the board has
    no files of the session and runs nothing.
    """
    address, rows = f"ssh://{board.name}", []
    with steady_boards():
        whole = tuned(board.path / "whole", [address])
        # The first run leaves its files on the board. If a run finds these files, it needs fewer requests.
        with cut_at(0, board.cut) as requests:
            tuned(board.path / "second", [address])
        # The last request only ends the last session. A run that is cut there already has all results.
        points = [1 + round(i * (len(requests) - 2) / max(1, given.cuts - 1)) for i in range(given.cuts)]
        for number in points:
            output, line = cut_run(board, address, number)
            at, left = requests[number - 1], output.exists()
            if not line:
                rows.append({"request": number, "at": at, "line": line, "one line": False})
                print(f"{number:3} of {len(requests)}, {at}: NOT CUT, each run needed fewer requests", flush=True)
                continue
            again = tuned(output, [address], resume=True)
            good = {
                "one line": line.isprintable(),
                "nothing half done": not left,
                "same bundle": models(again.bundle) == models(whole.bundle),
                "clean": not any((board.home / ".cache" / "edgeq-device" / "tmp").iterdir()),
                "ended": wait_until(lambda: not children(board.process.pid)),
            }
            rows.append({"request": number, "at": at, "line": line, **good})
            print(f"{number:3} of {len(requests)}, {at}: {line}; ", end="")
            print(", ".join(name if held else f"NOT {name}" for name, held in good.items()), flush=True)
    held = sum(all(value is not False for value in row.values()) for row in rows)
    print(f"{held} of {len(rows)} cuts: one line, nothing lost, the same bundle, a clean board (bar: all)")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2))
    return 0 if held == len(rows) else 1


def cut_run(board: Sshd, address: str, number: int) -> tuple[Path, str]:
    """Cut the connection of a run at a request. Return the run's output and the line with which it ends, or "" if the
    run ended before the cut.

    A measured profile decides how many layers the run tries in float, and so how many requests it needs. This function
    therefore tries up to five runs.
    """
    for attempt in range(5):
        output = board.path / f"cut-{number}-{attempt}"
        try:
            with cut_at(number, board.cut):
                tuned(output, [address])
        except BoardError as error:
            return output, str(error)
    return output, ""


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Return whether the condition becomes true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def pythons(given: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the names of the boards, each with the command that starts the board's Python."""
    emulated = [(EMULATED, shlex.join(build_command(find_emulator("arm64"), CPU).interpreter))] if given.arm64 else []
    return [*((name, shlex.quote(sys.executable)) for name in ("one", "two")), *emulated]


def started(network: Network, name: str, python: str) -> Sshd:
    """Start a board and return it. The emulated board has its packages where `pip install --user` would put them."""
    board = network.start(name, f'exec {python} "$@"')
    sysroot = load_sysroot(find_emulator("arm64")) if name == EMULATED else None
    if sysroot is not None and sysroot.site is not None:
        version = next((sysroot.root / "usr" / "lib").glob("python3.*")).name
        place = board.home / ".local" / "lib" / version
        place.mkdir(parents=True)
        (place / "site-packages").symlink_to(sysroot.site)
    return board


def made(folder: Path) -> tuple[Path, Path]:
    """Write a model and samples, and return their paths.

    The model is so large that its latency does not depend on where it is in memory. The latency of a very small model
    can differ by half from one process to the next.
    """
    random = np.random.default_rng(0)
    np.savez(folder / "x.npz", x0=random.normal(size=(16, CHANNELS, SIZE, SIZE)).astype(np.float32))
    return chain(folder / "chain.onnx", LAYERS, ""), folder / "x.npz"


def measured(board: Sshd, given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one board. They are the p50 of pairs of runs (one over SSH, one by hand), and the number of
    bytes sent.
    """
    bundle = board.path / "bundle"
    target = ("-t", "arm64-dotprod") if board.name == EMULATED else ()
    ran("package", given.model, "--data", given.data, *target, "--no-emulate", "-o", bundle)
    options = ["--duration", str(given.duration), "--threads", "1"]
    first = ran("verify", bundle, "--on", f"ssh://{board.name}")["boards"][0]
    over, by_hand, again = [], [], {}
    for turn in range(given.runs):
        for there in (True, False) if turn % 2 else (False, True):
            if there:
                again = ran("bench", bundle, "--on", f"ssh://{board.name}", *options)
                over.append(p50(again))
            else:
                by_hand.append(p50(by_hand_on(board, bundle, options)))
    ratios = [one / other - 1 for one, other in zip(over, by_hand, strict=True)]
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    sent = ran("verify", bundle, "--on", f"ssh://{board.name}")["boards"][0]["board"]["bytes_sent"]
    return {
        "board": board.name,
        "architecture": first["verification"]["architecture"],
        "variant": next(name for name in again["models"] if name != "float32"),
        "over_ms": over,
        "by_hand_ms": by_hand,
        "overhead": median,
        "middle": [low, high],
        "bytes": sent,
        "sent_again": sent / first["board"]["bytes_sent"],
    }


def ran(*words: object) -> dict[str, Any]:
    """Run a command with --json and return its result."""
    return edgeq_json(*map(str, words))


def by_hand_on(board: Sshd, bundle: Path, options: list[str]) -> Any:
    """Run the bundle's own runner in the board's environment, without SSH, and return its report."""
    python = board.path / "bin" / "python3"
    line = [str(python), "-B", str(bundle / "edgeq_run.py"), "bench", "--json", *options]
    done = subprocess.run(line, env={**os.environ, "HOME": str(board.home)}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def p50(report: Any) -> float:
    """Return the p50 of the quantized model."""
    models = report["scenarios"]["single-stream"]["models"]
    return float(next(m["latency"]["p50_ms"] for name, m in models.items() if name != "float32"))


if __name__ == "__main__":
    sys.exit(main())
