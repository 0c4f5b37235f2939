"""Send signals at random moments to quantize, package, tune, push and toolkit, then check what is left.

    python benchmarks/signals.py [--signals N] [--seed N] [--only NAME ...] [--kinds KIND ...]

Each run is the real command in a process of its own, and replaces an earlier output with another one. At a random
moment within the duration of a whole run, often in its first tenth of a second, it gets a signal: Ctrl-C as a terminal
sends it (to both processes of edgeq), SIGTERM, SIGHUP, two different or two equal signals, or SIGKILL. Then

- the output is the complete old one or the complete new one,
- the command printed no traceback and ended with the documented exit code,
- nothing else is left: no private folder, no temporary folder and no process. After SIGKILL, this must hold after the
  next run, which must succeed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from edgeq import demo
from edgeq.util.folders import shipped
from edgeq.util.marker import sha256

ROOT = Path(__file__).resolve().parent.parent
DATA = ("--data", str(demo.CALIBRATION), "--count", "4", "-q")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
LIMIT_S = 300.0
_TURN_S = 0.6
"""Seconds between two equal signals: from half a second on, the second one is not the echo of the first."""

# A Python in place of the toolkit's, because the real one has 730 MB. Its pip writes files for a second.
TOOLKIT = """
from edgeq.__main__ import main
import sys
from pathlib import Path
from edgeq.run import toolkit
toolkit.find_base = lambda kit: Path({base!r})
sys.argv[1:] = ["toolkit", "rknn", "--install", "-q"]
main()
"""
BASE = """#!/bin/sh
mkdir -p "$4/bin" && cat >"$4/bin/python" <<'END' && chmod 755 "$4/bin/python"
#!/bin/sh
if [ "$2" = -c ]; then echo 2.5.0; exit 0; fi
for i in 0 1 2 3 4 5 6 7 8 9; do echo $i >"${0%/*}/../$i"; sleep 0.1; done
END
"""


@dataclass(frozen=True)
class Trial:
    """Hold the place of a run: its folder for outputs, and its folder for temporary files."""

    place: Path
    work: Path

    def start(self, words: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command in a process group of its own, with default handlers of signals."""
        path = os.pathsep.join([str(ROOT), str(shipped("targets") / "runtime")])
        folders = {"TMPDIR": str(self.work), "XDG_CACHE_HOME": str(self.place), "XDG_STATE_HOME": str(self.work / "s")}
        return subprocess.Popen(
            [sys.executable, *(word.replace("{place}", str(self.place)) for word in words)],
            cwd=self.place,
            env={**os.environ, "PYTHONPATH": path, **folders},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_start_session,
        )

    def finish(self, words: Sequence[str]) -> str:
        """Run a command to its end, and return its messages if it fails."""
        process = self.start(words)
        _, errors = process.communicate(timeout=LIMIT_S)
        return errors.strip() if process.returncode else ""

    def contents(self) -> dict[str, str]:
        """Return path → digest of the files in the place, without the folder from which tune resumes."""
        files = (p for p in sorted(self.place.rglob("*")) if p.is_file() and ".tuning/" not in p.as_posix())
        return {path.relative_to(self.place).as_posix(): sha256(path) for path in files}

    def leftovers(self) -> list[str]:
        """Return the unfinished folders in the place, and the folders for temporary files."""
        partial = [path.name for path in self.place.rglob("*.partial")]
        return partial + [path.name for path in self.work.iterdir() if path.name != "s"]


@dataclass(frozen=True)
class Case:
    """Describe a command to interrupt.

    Attributes:
        words: the command line after the interpreter, with {place} for its folder.
        other: the command line that first writes another output to the same place; empty if there is none.
        proof: command line that succeeds if the output is complete; empty if the output is the same in every run.
    """

    words: tuple[str, ...]
    other: tuple[str, ...] = ()
    proof: tuple[str, ...] = ()

    def is_whole(self, trial: Trial, old: dict[str, str], new: dict[str, str]) -> bool:
        """Return whether the place contains the complete old or new output."""
        found = trial.contents()
        return found in (old, new) or (bool(self.proof) and not trial.finish(self.proof))


def cases(registry: str) -> dict[str, Case]:
    """Return all cases by name. `registry` is the address of a registry."""
    model, run = str(demo.MODEL), ("-P", "-m", "edgeq")
    quantize, package = ((*run, name, model, *DATA, "--no-timing", "--force", "-o") for name in ("quantize", "package"))
    tune = (*run, "tune", model, *DATA, "--budget", "2s", "--max-drop", "20%", "--force", "-o", "{place}/t")
    bundle = (*run, "package", model, *DATA, "--no-timing", "-o", "{place}/b")
    return {
        "quantize": Case((*quantize, "{place}/m.onnx"), (*quantize, "{place}/m.onnx", "--dynamic")),
        "package": Case((*package, "{place}/b"), (*package, "{place}/b", "--with-float")),
        "package zip": Case((*package, "{place}/b.edgeq"), (*package, "{place}/b.edgeq", "--with-float")),
        "tune": Case(tune, (*package, "{place}/t"), (*run, "verify", "{place}/t", "-q")),
        "push": Case((*run, "push", "{place}/b", f"{registry}/net:1"), bundle),
        "toolkit": Case(("-P", "-c", TOOLKIT.format(base="{place}/base")), ("-P", "-c", "")),
    }


@contextmanager
def serve_registry() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Serve a registry on this machine. Yield its address and its files by path. Each request takes 20 ms."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            time.sleep(0.02)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            place, _, query = self.path.partition("?")
            if self.command == "POST":
                self.send_response(202)
                self.send_header("Location", "/v2/net/blobs/uploads/1?state=x")
                body = b""
            elif self.command == "PUT":
                files[query.rpartition("=")[2] if query else place] = body
                self.send_response(201)
                body = b""
            else:
                found = files.get(place if "/manifests/" in place else place.rpartition("/")[2])
                self.send_response(404 if found is None else 200)
                body = found or b""
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                with suppress(OSError):
                    self.wfile.write(body)

        do_GET = do_HEAD = do_POST = do_PUT = do  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            del format, args

        def handle(self) -> None:
            with suppress(OSError):
                super().handle()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", files
        server.shutdown()


def _start_session() -> None:
    os.setsid()
    for number in CODES:
        signal.signal(number, signal.SIG_DFL)


def _group(number: signal.Signals) -> Callable[[subprocess.Popen[str]], None]:
    return lambda process: os.killpg(process.pid, number)


def _twice(first: signal.Signals, second: signal.Signals, wait_s: float) -> Callable[[subprocess.Popen[str]], None]:
    def send(process: subprocess.Popen[str]) -> None:
        process.send_signal(first)
        time.sleep(wait_s)
        process.send_signal(second)

    return send


KINDS: dict[str, tuple[Callable[[subprocess.Popen[str]], None], set[int]]] = {
    "Ctrl-C": (_group(signal.SIGINT), {130, -2}),
    "SIGTERM": (lambda process: process.terminate(), {143, -15}),
    "SIGHUP": (_group(signal.SIGHUP), {129, -1}),
    "SIGTERM twice": (_twice(signal.SIGTERM, signal.SIGTERM, 0.01), {143, -15}),
    "SIGTERM again": (_twice(signal.SIGTERM, signal.SIGTERM, _TURN_S), {143, -15}),
    "SIGHUP, SIGTERM": (_twice(signal.SIGHUP, signal.SIGTERM, 0.01), {129, -1, 143, -15}),
    "SIGKILL": (_group(signal.SIGKILL), {-9}),
    "SIGKILL of the parent": (lambda process: process.kill(), {-9}),
}


def attempt(case: Case, trial: Trial, kind: str, seconds: float, old: dict[str, str], new: dict[str, str]) -> str:
    """Interrupt one run after `seconds`. Return "" if all is well, or else what is wrong."""
    send, codes = KINDS[kind]
    process = trial.start(case.words)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        send(process)
    try:
        _, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "HANGS"
    # Python itself prints a traceback if Ctrl-C arrives before it runs any line of edgeq.
    if "Traceback" in errors and f"{ROOT}{os.sep}edgeq" in errors:
        return f"TRACEBACK: {errors}"
    if "Traceback" in errors:
        return "" if trial.contents() == old else "CHANGED"
    if process.returncode not in codes | {0}:
        return f"EXIT CODE {process.returncode}: {errors}"
    killed = process.returncode == -9
    if not killed and (left := trial.leftovers()):
        return f"LEFT: {left}"
    if not killed and not case.is_whole(trial, old, new):
        return "HALF WRITTEN"
    if killed:
        time.sleep(0.2)  # until the children of the process have ended
        if problem := trial.finish(case.words):
            return f"NEXT RUN FAILS: {problem}"
        if left := trial.leftovers():
            return f"LEFT AFTER THE NEXT RUN: {left}"
        if not case.is_whole(trial, new, new):
            return "DIFFERS AFTER THE NEXT RUN"
    return ""


def measure(name: str, case: Case, kinds: Sequence[str], signals: int, chance: random.Random) -> Counter[str]:
    """Interrupt one command `signals` times, and count the results."""
    with tempfile.TemporaryDirectory(prefix="edgeq-signals-") as folder:
        before, trial = Path(folder) / "before", Trial(Path(folder) / "place", Path(folder) / "work")

        def reset() -> None:
            for place in (trial.place, trial.work):
                shutil.rmtree(place, ignore_errors=True)
            if before.is_dir():
                shutil.copytree(before, trial.place, symlinks=True)
            else:
                trial.place.mkdir(mode=0o700)
            trial.work.mkdir(mode=0o700)

        reset()
        (trial.place / "base").write_text(BASE)
        (trial.place / "base").chmod(0o755)
        problem = trial.finish(case.other)
        assert not problem, problem
        trial.place.rename(before)
        reset()
        old, start = trial.contents(), time.monotonic()
        problem = trial.finish(case.words)
        assert not problem, problem
        seconds, new = time.monotonic() - start, trial.contents()
        found: Counter[str] = Counter()
        for number in range(signals):
            reset()
            kind = kinds[number % len(kinds)]
            moment = chance.uniform(0, 0.1) if chance.random() < 0.15 else chance.uniform(0, 1.05 * seconds)
            result = attempt(case, trial, kind, moment, old, new)
            found[result.partition(":")[0] or "fine"] += 1
            if result:
                print(json.dumps({"case": name, "kind": kind, "after_s": round(moment, 3), "is": result}), flush=True)
        counts = ", ".join(f"{count} {what}" for what, count in sorted(found.items()))
        print(f"{name:12} {seconds:5.1f} s  {counts}", flush=True)
        return found


def main() -> int:
    """Print a line for each case, and return 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=500, help="total number of signals (default: 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(cases("")), default=list(cases("")))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    given = parser.parse_args()
    chance, found = random.Random(given.seed), Counter[str]()
    with serve_registry() as (host, _):
        for name in given.only:
            case = cases(host)[name]
            found += measure(name, case, given.kinds, -(-given.signals // len(given.only)), chance)
    wrong = sum(count for what, count in found.items() if what != "fine")
    print(f"{sum(found.values())} signals, {wrong} of them with a problem")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
