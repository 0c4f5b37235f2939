"""Kills at random moments of quantize, package, calibrate and tune: what is left, and what the next run makes of it.

    python benchmarks/kills.py [--kills N] [--seed N] [--only NAME ...]

Each run replaces an earlier output of other content and is killed (SIGKILL, with its children) at a random moment of
the time that a whole run takes. Then the output must be the old or the new one, whole; a model with external data may
be missing, and then the next run must find the old one. The next run goes on (`--resume`) or starts anew, and what it
writes must be what a run without a kill writes, byte by byte, but for the times in tune's record.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import edgeq
from edgeq import demo
from edgeq.cli import group
from edgeq.model import load
from edgeq.util.outputs import check_free, sha256

DATA = ("--data", str(demo.CALIBRATION), "--count", "8", "-q")
Contents = dict[str, str]


@dataclass(frozen=True)
class Case:
    """What is killed.

    Attributes:
        output: name of what it writes.
        run: writes it into a folder, over what is there.
        other: writes something else there first.
        kept: suffixes of the files that must be the same in every run; none: all.
    """

    output: str
    run: Callable[[Path], object]
    other: Callable[[Path], object]
    kept: tuple[str, ...] = ()


def command(*arguments: str) -> Callable[[Path], object]:
    """`edgeq` with an output of that name, which is the last argument."""

    def run(place: Path) -> None:
        try:
            group.main([*arguments[:-1], "-o", str(place / arguments[-1])], prog_name="edgeq")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{arguments[0]} ended with {end.code}") from end

    return run


def calibrate(place: Path) -> None:
    """With checkpoints all the time."""
    edgeq.calibrate(demo.MODEL, str(demo.CALIBRATION), place / "CAL", count=64, resume=True, checkpoint_seconds=0.01)


def nothing(place: Path) -> None:
    del place


def cases() -> dict[str, Case]:
    """All of them by name."""
    model, quick, force = str(demo.MODEL), (*DATA, "--no-timing"), "--force"
    quantize, package = ("quantize", model, *quick, force), ("package", model, *quick, force)
    other = ("--dynamic", "--op-type", "Conv", "--weight-type", "uint8")
    tune = ("tune", model, *DATA[:3], "4", "-q", "-t", "gemmini", "--max-drop", "0.2", force)
    return {
        "quantize": Case("m.onnx", command(*quantize, "m.onnx"), command(*quantize, *other, "m.onnx")),
        "package": Case("b", command(*package, "b"), command(*package, "--with-float", "b")),
        "package zip": Case("b.edgeq", command(*package, "b.edgeq"), command(*package, "--with-float", "b.edgeq")),
        "calibrate": Case("CAL", calibrate, nothing),
        "tune": Case("t", command(*tune, "--resume", "t"), command(*package, "t"), (".onnx", ".npz")),
    }


def contents(place: Path, kept: tuple[str, ...] = ()) -> Contents:
    """Relative path → digest of every file that is not a draft."""
    return {
        path.relative_to(place).as_posix(): sha256(path)
        for path in sorted(place.rglob("*"))
        if path.is_file() and ".partial/" not in f"{path}" and (not kept or path.suffix in kept)
    }


def in_a_process(work: Callable[[], object], seconds: float | None = None) -> bool:
    """Run `work` in a process group of its own; with `seconds`, kill it then. Whether it came to its end."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(os.devnull, "w") as silence:  # noqa: PTH123
            os.dup2(silence.fileno(), 1)
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), code
    return code == 0


def whole(case: Case, place: Path) -> Contents:
    """What is at the output and next to it, without the folder that tune goes on from."""
    folder = f"{case.output}.tuning/"
    return {name: digest for name, digest in contents(place).items() if not name.startswith(folder)}


def killed(case: Case, place: Path, old: Contents, new: Contents, seconds: float) -> str:
    """Kill one run after some seconds; what was left, in a word."""
    ended = in_a_process(lambda: case.run(place), seconds)
    left = whole(case, place)
    if left == {} and old:
        check_free(place / case.output, force=True)
        if whole(case, place) != old:
            return "LOST"
        found = "put back"
    elif case.output == "CAL" and not ended:
        found = "part" if left else "nothing"
    else:
        same = [name for name, right in (("old", old), ("new", new)) if left == right]
        if not same and case.kept and contents(place / case.output, case.kept) == new:
            same = ["new"]
        if not same:
            return "HALF WRITTEN"
        found = same[0]
    in_a_process(lambda: case.run(place))
    again = contents(place / case.output, case.kept) if case.kept else whole(case, place)
    return found if again == new else "DIFFERS AFTER THE NEXT RUN"


def measure(name: str, case: Case, kills: int, chance: random.Random) -> Counter[str]:
    """So many kills of one case."""
    with tempfile.TemporaryDirectory(prefix="edgeq-kills-") as folder:
        before, place = Path(folder) / "before", Path(folder) / "place"
        before.mkdir()
        in_a_process(lambda: case.other(before))
        shutil.copytree(before, place)
        start = time.monotonic()
        in_a_process(lambda: case.run(place))
        seconds = time.monotonic() - start
        new = contents(place / case.output, case.kept) if case.kept else whole(case, place)
        found: Counter[str] = Counter()
        for _ in range(kills):
            shutil.rmtree(place)
            shutil.copytree(before, place)
            found[killed(case, place, whole(case, before), new, chance.uniform(0, 1.05 * seconds))] += 1
        print(
            f"{name:12} {seconds:5.1f} s  {', '.join(f'{n} {what}' for what, n in sorted(found.items()))}", flush=True
        )
        return found


def main() -> int:
    """Print a line for each case; 1 where something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in all (200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(cases()), default=list(cases()))
    given = parser.parse_args()
    # Every model with external data, as one of more than 1 GiB has: the case that needs several moves.
    assert load.save_model.__kwdefaults__ is not None
    load.save_model.__kwdefaults__["inline_limit"] = 1024
    chance, found = random.Random(given.seed), Counter[str]()
    for name in given.only:
        found += measure(name, cases()[name], -(-given.kills // len(given.only)), chance)
    bad = sum(count for what, count in found.items() if what.isupper())
    print(f"{sum(found.values())} kills, {bad} of them lost something")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
