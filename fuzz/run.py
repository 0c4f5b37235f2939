"""Run cases in forked processes with limits. The following are findings: an error that is not one line, a crash, too
much time or memory, access to a file outside of the case's folder, and output that moves a cursor.

A case runs like a command: `confine` relays what libraries print, and `ends_in_one_line` prints an error. All output
goes to the file `printed`.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

from edgeq_device.errors import BudgetError
from edgeq_device.system.budget import VARIABLE, Budget, confine, renew

from edgeq.util.device_errors import device_errors
from edgeq.util.process import ends_in_one_line
from fuzz.layers import LAYERS, Layer, expected, make_seeds
from fuzz.mutate import SPOOF

SECONDS = 20
MEMORY = 1 << 30
"""Limit in bytes, in addition to the memory of the process before its first case."""
BATCH = 20_000
_END = b"end of what the case printed"
_RELAYED_WITHIN = 30
"""Seconds within which the output of a library must be in `printed`."""
_REPOSITORY = Path(__file__).resolve().parent.parent
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = frozenset(
    {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.truncate"}
)
_FORBIDDEN = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "pickle.find_class"}
)


@dataclass
class LayerCounts:
    """Count the results of the cases of one layer.

    Attributes:
        refused: number of cases that ended in one line.
        contained: number of cases that were ended by a limit, or by a crash in a library that runs graphs.
        findings: kind of finding → how often it occurred.
    """

    cases: int = 0
    refused: int = 0
    contained: int = 0
    seconds: float = 0.0
    findings: dict[str, int] = field(default_factory=dict)


def case_of(layer: Layer, seeds: list[Path], seed: int, index: int) -> tuple[str, bytes]:
    """Return the name and the content of a case, which depend only on `seed` and `index`. The first cases are the
    unchanged files.
    """
    random = Random(f"{seed} {layer.name} {index}")
    chosen = seeds[index] if index < len(seeds) else random.choice(seeds)
    content = _content(chosen)
    if index >= len(seeds):
        like = [_content(file) for file in seeds if file.suffix == chosen.suffix]
        content = layer.mutate(random, content, like)
    return chosen.name, content


@functools.cache
def _content(path: Path) -> bytes:
    return path.read_bytes()


def run_case(layer: Layer, name: str, content: bytes, folder: Path) -> BaseException | None:
    """Read one case in `folder`, and return the exception that this raised, or None."""
    path = folder / "case" / name
    if not path.parent.is_dir():
        path.parent.mkdir()
    path.write_bytes(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer.read(path)
    except Exception as error:
        return error
    finally:
        for left in path.parent.iterdir():
            if left.is_file():
                left.unlink()
            elif left.name not in ("bundle", "good"):  # a layer keeps these folders from case to case
                shutil.rmtree(left)
    return None


def run_layer(
    layer: Layer, seed: int, start: int, cases: int, save: Path, *, until: Callable[[], bool] = lambda: False
) -> LayerCounts:
    """Run cases `start` to `start + cases` in child processes until `until` is true. Save findings under `save`."""
    counts = LayerCounts()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="edgeq-fuzz-") as name, _counter() as counter:
        work = Path(name)
        printed = work / "printed"
        _in_child(lambda: make_seeds(layer, work / "seeds"), printed)
        seeds = make_seeds(layer, work / "seeds")
        before = files_around(work)
        at = start
        while at < start + cases and not until():
            stop = min(at + BATCH, start + cases)
            log = work / "log"
            log.unlink(missing_ok=True)
            printed.unlink(missing_ok=True)
            counter[:8] = struct.pack("q", at)
            status = _in_child(lambda: _run_batch(layer, seeds, seed, (at, stop), work, log, counter, until), printed)  # noqa: B023
            done = struct.unpack("q", counter[:8])[0]
            lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            for index, kind, what in lines:
                if kind == "finding":
                    _report(counts, layer, seeds, seed, index, what, save)
                else:
                    setattr(counts, kind, getattr(counts, kind) + what)
            left = printed.read_bytes()
            if (hostile := escapes(left)) is not None:
                _report(counts, layer, seeds, seed, done, hostile, save)
            if status:
                what = _ended(left)
                if layer.native and os.waitstatus_to_exitcode(status) == BudgetError.exit_code:
                    counts.contained += 1
                else:
                    _report(counts, layer, seeds, seed, done, what, save)
                counts.cases += done + 1 - at
                at = done + 1
                shutil.rmtree(work / "case", ignore_errors=True)
            else:
                counts.cases += done + 1 - at
                at = done + 1
            now = files_around(work)
            for what in _changed(before, now):
                if [what] not in [line[2:] for line in lines]:
                    _report(counts, layer, seeds, seed, done, what, save)
            before = now
    counts.seconds = time.monotonic() - began
    return counts


def _run_batch(
    layer: Layer,
    seeds: list[Path],
    seed: int,
    span: tuple[int, int],
    work: Path,
    log: Path,
    counter: mmap.mmap,
    until: Callable[[], bool],
) -> None:
    folder, temporary = work / "case", work / "tmp"
    folder.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    os.chdir(folder)
    tempfile.tempdir = str(temporary)
    os.environ.update(TMPDIR=str(temporary), HOME=str(work))
    os.environ[VARIABLE] = "off"  # the limits that are set below apply instead
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # edgeq's programs set this too
    confine("fuzz")
    if layer.native:
        _let_onnxruntime_warn()
    run_case(layer, *case_of(layer, seeds, seed, 0), folder)  # the memory that this case's imports take does not count
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    refused = contained = 0
    touched: list[str] = []
    around = files_around(work)
    with log.open("a") as stream, (work / "printed").open("r+b") as printed:
        _watch(touched, (folder / "case", temporary), work)

        def note(*line: Any) -> None:
            stream.write(json.dumps(line) + "\n")
            stream.flush()

        for index in range(*span):
            counter[:8] = struct.pack("q", index)
            renew(Budget(seconds=SECONDS))
            error = run_case(layer, *case_of(layer, seeds, seed, index), folder)
            if error is not None and expected(error):
                with suppress(SystemExit), ends_in_one_line(), device_errors():
                    raise error
            if (hostile := _escapes_of_case(printed)) is not None:
                note(index, "finding", hostile)
            now = files_around(work)
            touched += _changed(around, now)
            around = now
            for what in dict.fromkeys(touched):
                note(index, "finding", what)
            touched.clear()
            if isinstance(error, MemoryError) and layer.native:
                contained += 1
            elif error is not None and not expected(error):
                note(index, "finding", _where(error))
            elif error is not None:
                refused += 1
            late = until()
            if late or index % 100 == 99 or index + 1 == span[1]:
                note(index, "refused", refused)
                note(index, "contained", contained)
                refused = contained = 0
            if late:
                break


def _let_onnxruntime_warn() -> None:
    """Let sessions log warnings, so that the relay has names to escape. Other versions and plug-ins may log warnings
    even if edgeq turns them off.
    """
    import onnxruntime

    made: Any = onnxruntime.SessionOptions

    class Warns(made):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, 2 if name == "log_severity_level" else value)

    onnxruntime.SessionOptions = Warns


def _where(error: BaseException) -> str:
    """Return the type of an error and the last line of edgeq's code in its traceback. Errors with the same text count
    as one finding.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/edgeq" in f.filename]
    own = [f for f in frames if "site-packages" not in f.filename]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
    return f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:120]}"


def _report(counts: LayerCounts, layer: Layer, seeds: list[Path], seed: int, index: int, what: str, save: Path) -> None:
    kind = what.partition(": ")[0]
    counts.findings[kind] = counts.findings.get(kind, 0) + 1
    if counts.findings[kind] > 1:
        return
    name, content = case_of(layer, seeds, seed, index)
    save.mkdir(parents=True, exist_ok=True)
    place = save / f"{layer.name}-{seed}-{index}{Path(name).suffix}"
    place.write_bytes(content)
    print(f"{layer.name}: case {index}: {what}\n  {place}")
    print(f"  again: scripts/fuzz {layer.name} --seed {seed} --case {index}", flush=True)


def _ended(printed: bytes) -> str:
    """Return the last printed line, in which `confine` states why the worker process ended."""
    lines = printed.decode("utf-8", "backslashreplace").split("\n")
    return next((line.removeprefix("fuzz: ") for line in reversed(lines) if line), "ended without output")


def _escapes_of_case(printed: BinaryIO) -> str | None:
    """Wait until the relay has written all output since the last call, and return the result of `escapes` for that
    output.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, b"\n" + _END + b"\n")
    ends, found = time.monotonic() + _RELAYED_WITHIN, b""
    while _END not in found and time.monotonic() < ends:
        found += printed.read()
        time.sleep(0.0002)
    printed.seek(0)
    printed.truncate()
    return escapes(found) if _END in found else f"printed no more within {_RELAYED_WITHIN} s"


def escapes(printed: bytes) -> str | None:
    """Return a message that quotes the first line with an unescaped character, or None if there is no such line. Such a
    character is a line break from a name, or it moves a cursor, sets a text direction or is invisible.
    """
    for line in printed.decode("utf-8", "surrogateescape").split("\n"):
        if line.startswith(SPOOF) or any(unicodedata.category(c) in _HIDDEN for c in line if c != "\t"):
            return f"prints an escape: {line[:200]!r}"
    return None


def files_around(work: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of all files below `work`, except files in the folders for cases and for temporary
    files.
    """
    found = {}
    for folder, inner, names in os.walk(work):
        own = Path(folder) == work
        inner[:] = [n for n in inner if not (own and n == "tmp") and Path(folder, n) != work / "case" / "case"]
        for name in (*inner, *names):
            if own and name in ("case", "log", "printed", "seeds"):
                continue
            state = os.lstat(Path(folder, name))
            found[os.path.join(folder, name)] = (state.st_size, state.st_mtime_ns)  # noqa: PTH118
    return found


def _changed(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> list[str]:
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return [f"left or changed {Path(name).name} outside of its folder" for name in names]


def _in_child(work: Callable[[], object], printed: Path) -> int:
    """Run `work` in a process whose standard output and standard error go to the file `printed`, and return the exit
    status.
    """
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(output, number)
                setattr(sys, name, open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


@contextmanager
def _counter() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, 8) as shared:
        yield shared


def _data_bytes() -> int:
    """Return the private writable memory of this process in bytes, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


def _watch(touched: list[str], own: tuple[Path, ...], work: Path) -> None:
    """Record files that are changed outside of `own`, and files that are read outside of `work` and of the installed
    files.
    """
    inside = tuple(f"{os.path.realpath(path)}/" for path in own)
    installed = tuple(f"{os.path.realpath(p)}/" for p in (work, sys.prefix, sys.base_prefix, _REPOSITORY))
    system = (
        "/proc/",
        "/sys/",
        "/dev/",
        "/usr/",
        "/lib",
        "/etc/ld.so",
        "/etc/localtime",
        "/etc/mime.types",
        "/etc/os-release",
    )

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FORBIDDEN:
            touched.append(f"{event} was called")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            writes = bool((arguments[2] or 0) & _WRITES)
            if not path.startswith(inside if writes else (*installed, *system)) and path != os.devnull:
                touched.append(f"{'writes' if writes else 'opens'} {path}")
        elif event in _CHANGES and isinstance(arguments[0], str | bytes):
            folder = arguments[-1] if event != "os.truncate" else -1
            base = f"/proc/self/fd/{folder}" if isinstance(folder, int) and folder >= 0 else ""
            path = os.path.realpath(Path(base, os.fsdecode(arguments[0])).parent)
            if not f"{path}/".startswith(inside):
                touched.append(f"{event} of {path}")

    sys.addaudithook(hook)


def table(by_layer: dict[str, LayerCounts]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| layer | cases | refused | contained | s | findings |", "|---|---|---|---|---|---|"]
    for name, counts in by_layer.items():
        found = "; ".join(f"{what} ({count})" for what, count in counts.findings.items()) or "0"
        lines.append(
            f"| {name} | {counts.cases} | {counts.refused} | {counts.contained} | {counts.seconds:.0f} | {found} |"
        )
    total = sum(counts.cases for counts in by_layer.values())
    bad = sum(sum(counts.findings.values()) for counts in by_layer.values())
    return "\n".join([*lines, f"| all | {total} | | | {sum(t.seconds for t in by_layer.values()):.0f} | {bad} |"])


def layers_named(names: tuple[str, ...]) -> list[Layer]:
    """Return the layers with these names, or all layers if there are no names."""
    unknown = sorted(set(names) - set(LAYERS))
    if unknown:
        raise SystemExit(f"fuzz: there is no layer {unknown[0]}. There are: {', '.join(LAYERS)}")
    return [LAYERS[name] for name in names] or list(LAYERS.values())
