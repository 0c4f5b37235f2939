"""Kill quantize, package, calibrate and tune at random moments, then check the files that are left and the next run.

    python benchmarks/kills.py [--kills N] [--seed N] [--only NAME ...]

Each run replaces an earlier output with different content. It is killed (SIGKILL, including its children) at a random
moment within the duration of a whole run. Afterwards, the output must be either the complete old one or the complete
new one. A model with external data may be missing, but the next run must then find the old one. The next run continues
(`--resume`) or starts again. Its output must be byte for byte the same as that of a run that is not killed, except for
the times in tune's record.
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
from edgeq.util.marker import sha256
from edgeq.util.outputs import check_free

DATA = ("--data", str(demo.CALIBRATION), "--count", "8", "-q")
Contents = dict[str, str]


@dataclass(frozen=True)
class Case:
    """Describe a run to kill.

    Attributes:
        output: name of the output.
        run: function that writes the output into a folder and replaces an existing output.
        other: function that first writes a different output to the same place.
        kept: suffixes of the files that must be the same in every run. If this is empty, all files must be the same.
    """

    output: str
    run: Callable[[Path], object]
    other: Callable[[Path], object]
    kept: tuple[str, ...] = ()


def command(*arguments: str) -> Callable[[Path], object]:
    """Return a function that runs `edgeq` with these arguments. The last argument is the name of the output."""

    def run(place: Path) -> None:
        try:
            group.main([*arguments[:-1], "-o", str(place / arguments[-1])], prog_name="edgeq")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{arguments[0]} ended with {end.code}") from end

    return run


def calibrate(place: Path) -> None:
    """Calibrate, and save a checkpoint every hundredth of a second."""
    edgeq.calibrate(demo.MODEL, str(demo.CALIBRATION), place / "CAL", count=64, resume=True, checkpoint_seconds=0.01)


def nothing(place: Path) -> None:
    """Write nothing."""
    del place


def cases() -> dict[str, Case]:
    """Return all cases by name."""
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
    """Return relative path → digest for every file that is not a draft."""
    return {
        path.relative_to(place).as_posix(): sha256(path)
        for path in sorted(place.rglob("*"))
        if path.is_file() and ".partial/" not in f"{path}" and (not kept or path.suffix in kept)
    }


def in_a_process(work: Callable[[], object], seconds: float | None = None) -> bool:
    """Run `work` in a process with its own process group, and return whether it ended by itself. With `seconds`, kill
    the group after that time.
    """
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
    """Return the files at the output and next to it, without the folder from which tune resumes."""
    folder = f"{case.output}.tuning/"
    return {name: digest for name, digest in contents(place).items() if not name.startswith(folder)}


def killed(case: Case, place: Path, old: Contents, new: Contents, seconds: float) -> str:
    """Kill one run after `seconds`, and return a word that describes the files that were left."""
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
    """Kill one case `kills` times, and count the results."""
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
    """Print a line for each case, and return 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="total number of kills (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(cases()), default=list(cases()))
    given = parser.parse_args()
    # Give every model external data, as models of more than 1 GiB have. Replacing such a model takes several moves of
    # files, and this case must test them.
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
