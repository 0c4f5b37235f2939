"""What measuring over SSH costs: `edgeq bench --on` beside the same bench started by hand on the board, in turns, and
the bytes that a second run sends. With `--cuts N` instead: a small `edgeq tune --on` whose link is cut, once each time,
at N points from its first request to its last, and that is resumed.

    python benchmarks/boards.py [--model FILE.onnx] [--runs N] [--duration S] [--arm64] [--cuts N] [--json FILE]

The boards are sshd's on this machine, each with a home of its own; `--arm64` adds one whose Python is the emulated
ARM64 machine that `edgeq emulate setup arm64` makes. Needs openssh-server. Start it on a quiet machine, which
`--cuts` does not need.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contenders import edgeq_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # sshd is started as the tests do it

from edgeq import demo
from edgeq.emulate.emulator import emulator_named
from edgeq.emulate.machine import emulated_command
from edgeq.emulate.sysroot import load_sysroot
from edgeq.errors import BoardError
from tests.remote.sshd import Network, Sshd, children
from tests.remote.tuning import cut_at, models, steady_boards, tuned

MOST_OVERHEAD, MOST_SENT = 0.03, 0.01
CPU, EMULATED = "cortex-a76", "arm64"


def main() -> int:
    """Measure, print, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", type=Path, default=demo.MODEL)
    parser.add_argument("--data", type=Path, default=demo.CALIBRATION)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--duration", type=float, default=2.0)
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
            found = [measured(started(network, *named), given) for named in pythons(given)]
        finally:
            network.end()
    for row in found:
        print(
            f"{row['board']} ({row['architecture']}): {row['variant']}, p50 over SSH {100 * row['overhead']:+.1f} % "
            f"of by hand (bar {100 * MOST_OVERHEAD:.0f} %); the second run sends {100 * row['sent_again']:.2f} % "
            f"({row['bytes']} bytes, bar {100 * MOST_SENT:.0f} %)"
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))
    native = [row for row in found if row["board"] != EMULATED]
    held = all(abs(row["overhead"]) <= MOST_OVERHEAD for row in native)
    return 0 if held and all(row["sent_again"] < MOST_SENT for row in found) else 1


def cut_short(board: Sshd, given: argparse.Namespace) -> int:
    """Cut the link at points of a run. Each time: one line; the resumed run gives the same bundle; what was for one
    session is gone from the board, and nothing runs there."""
    address, rows = f"ssh://{board.name}", []
    with steady_boards():
        with cut_at(0, board.cut) as requests:
            whole = tuned(board.path / "whole", [address])
        points = [1 + round(i * (len(requests) - 1) / max(1, given.cuts - 1)) for i in range(given.cuts)]
        for number in points:
            output, line = board.path / f"cut-{number}", ""
            try:
                with cut_at(number, board.cut):
                    tuned(output, [address])
            except BoardError as error:
                line = str(error)
            at, left = requests[number - 1], output.exists()
            again = tuned(output, [address], resume=True)
            good = {
                "one line": bool(line) and line.isprintable(),
                "nothing half done": not left,
                "same bundle": models(again.bundle) == models(whole.bundle),
                "clean": not any((board.home / ".cache" / "edgeq-device" / "tmp").iterdir()),
                "ended": wait_until(lambda: not children(board.process.pid)),
            }
            rows.append({"request": number, "at": at, "line": line, **good})
            print(f"{number:3} of {len(requests)}, {at}: {line or 'NOT CUT'}; ", end="")
            print(", ".join(name if held else f"NOT {name}" for name, held in good.items()), flush=True)
    held = sum(all(value is not False for value in row.values()) for row in rows)
    print(f"{held} of {len(rows)} cuts: one line, nothing lost, the same bundle, a clean board (bar: all)")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2))
    return 0 if held == len(rows) else 1


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def pythons(given: argparse.Namespace) -> list[tuple[str, str]]:
    """Boards by name, with the command that is their Python."""
    emulated = (
        [(EMULATED, shlex.join(emulated_command(emulator_named("arm64"), CPU).interpreter))] if given.arm64 else []
    )
    return [*((name, shlex.quote(sys.executable)) for name in ("one", "two")), *emulated]


def started(network: Network, name: str, python: str) -> Sshd:
    """A board; the emulated one has its packages where `pip install --user` would put them."""
    board = network.start(name, f'exec {python} "$@"')
    sysroot = load_sysroot(emulator_named("arm64")) if name == EMULATED else None
    if sysroot is not None and sysroot.site is not None:
        version = next((sysroot.root / "usr" / "lib").glob("python3.*")).name
        place = board.home / ".local" / "lib" / version
        place.mkdir(parents=True)
        (place / "site-packages").symlink_to(sysroot.site)
    return board


def measured(board: Sshd, given: argparse.Namespace) -> dict[str, Any]:
    """One board: medians of p50 over runs in turns, and bytes."""
    bundle = board.path / "bundle"
    target = ("-t", "arm64-dotprod") if board.name == EMULATED else ()
    ran("package", given.model, "--data", given.data, *target, "--no-emulate", "-o", bundle)
    options = ["--duration", str(given.duration), "--threads", "1"]
    first = ran("verify", bundle, "--on", f"ssh://{board.name}")["boards"][0]
    over, by_hand, again = [], [], {}
    for _ in range(given.runs):
        again = ran("bench", bundle, "--on", f"ssh://{board.name}", *options)
        over.append(p50(again))
        by_hand.append(p50(by_hand_on(board, bundle, options)))
    sent = ran("verify", bundle, "--on", f"ssh://{board.name}")["boards"][0]["board"]["bytes_sent"]
    return {
        "board": board.name,
        "architecture": first["verification"]["architecture"],
        "variant": next(name for name in again["models"] if name != "float32"),
        "over_ms": over,
        "by_hand_ms": by_hand,
        "overhead": statistics.median(over) / statistics.median(by_hand) - 1,
        "bytes": sent,
        "sent_again": sent / first["board"]["bytes_sent"],
    }


def ran(*words: object) -> dict[str, Any]:
    """What a command prints with --json."""
    return edgeq_json(*map(str, words))


def by_hand_on(board: Sshd, bundle: Path, options: list[str]) -> Any:
    """The bundle's own runner in the board's environment, without SSH."""
    python = board.path / "bin" / "python3"
    line = [str(python), "-B", str(bundle / "edgeq_run.py"), "bench", "--json", *options]
    done = subprocess.run(line, env={**os.environ, "HOME": str(board.home)}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def p50(report: Any) -> float:
    """Of the quantized model."""
    models = report["scenarios"]["single-stream"]["models"]
    return float(next(m["latency"]["p50_ms"] for name, m in models.items() if name != "float32"))


if __name__ == "__main__":
    sys.exit(main())
