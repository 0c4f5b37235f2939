"""Test a board whose every byte an attacker chooses. The command ends with one line and the exit code of an unusable
board, in time and with little memory. It prints no control characters, writes nothing, and leaves neither a process nor
a thread.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgeq import demo
from edgeq.cli import group
from edgeq.errors import BoardError, EdgeqError
from edgeq.measure.kernels import profile
from edgeq.remote import link as bounds
from edgeq.remote.clock import BoardClock
from edgeq.remote.devices import find_board
from edgeq.run.session import SessionSettings
from tests.remote.tuning import FEW

BOARD = "ssh://pi"
MOST_BYTES = 150 << 20
"""Memory that a command may take more than before: the answer's bytes, its objects, and the code that it imports."""
SLACK_S = 8.0
ESC = "\x1b]0;owned\x07\x1b[2J\r\u202e"
RAW = ESC.encode().decode("latin-1")
FIGURES = ("scenarios", "single-stream", "models", "model.onnx", "latency")

HONEST: dict[str, Any] = {
    "hello": {
        "python": "3.11.2",
        "system": "posix",
        "folder": "/b",
        "token": "AB12",
        "free": 1 << 33,
        "modules": {"numpy": "2.0.0", "onnxruntime": "1.30.0"},
        "paths": [],
        "private": False,
    },
    "tree": {"path": "/b/trees/x"},
    "clean": {"bytes": 12},
    "describe": {
        "evidence": {
            "system": "Linux",
            "machine": "aarch64",
            "cpuinfo": "processor\t: 0\nFeatures\t: fp asimd\n",
            "auxv": "",
            "sysctl": "",
            "cpuid": None,
        },
        "files": {"proc/meminfo": "MemTotal: 1000000 kB\n", "proc/self/cgroup": "0::/\n"},
        "affinity": 4,
        "os": "Linux 6.1",
        "versions": {"numpy": "2.0.0", "onnxruntime": "1.30.0"},
        "engines": {"openvino": {"version": "", "problem": ""}},
        "gpus": [],
        "state": {
            "clock_mhz": 1800.0,
            "governors": ["performance"],
            "temperature_c": {"zone0": 40.0},
            "thermal_throttles": 0,
            "load": 0.1,
            "free_bytes": 1 << 33,
        },
    },
    "open": {
        "session": 0,
        "inputs": [["image", "tensor(float)", ["N", 1, 16, 16]]],
        "outputs": [["logits", "tensor(float)", ["N", 10]]],
        "providers": ["CPUExecutionProvider"],
    },
    "run": ["logits", 10],
    "peak": {"session_peak_bytes": 1 << 20},
    "end profiling": {"profile": "/b/tmp/p.json"},
    "race": {
        "order": ["a"],
        "settled": True,
        "ties": [],
        "rounds": 1,
        "runners": {
            "a": {"index": 0, "samples_per_query": 1, "elapsed_s": 0.1, "busy": 0.0, "sessions": 1, "stolen": 0.0}
        },
    },
}


@dataclass(frozen=True)
class Scenario:
    """Describe what the board does, at which point, and under which command.

    Attributes:
        given: see `hostile_ssh.Board.hostile`.
        hurry: True if a deadline decides, which the test shortens.
        absent: True if nothing was sent to the board before.
        code: the command's exit code; 0 if the board does no harm.
    """

    command: str
    at: str
    act: str
    given: Any = None
    hurry: bool = False
    absent: bool = False
    code: int = BoardError.exit_code


def change(command: str, at: str, *changes: tuple[tuple[Any, ...], Any], code: int = 8) -> Scenario:
    return Scenario(command, at, "change", [[list(path), value] for path, value in changes], code=code)


def late(command: str, at: str, act: str = "silence", given: Any = "", **more: Any) -> Scenario:
    return Scenario(command, at, act, given, hurry=True, **more)


def deep(levels: int) -> str:
    return '{"a":' + "[" * levels + "]" * levels + "}\n"


def kernel(**changes: Any) -> str:
    """Return a line of onnxruntime's profile."""
    args = {"op_name": "Relu", "input_type_shape": [{"float": [1]}]}
    return json.dumps({"cat": "Node", "name": "a_kernel_time", "dur": 5, "args": args, **changes}) + ",\n"


MANY_FILES = {f"proc/f{i}": "x" for i in range(20_000)}
FRAME = "\x10\x00\x00\x00"

SCENARIOS = {
    # Lines: too long, too many, too slow, missing.
    "a line without end": Scenario("detect", "hello", "flood", "a"),
    "a line without end, later": Scenario("detect", "describe", "flood", "1"),
    "lines without end": Scenario("detect", "hello", "flood", "{}\n"),
    "empty lines without end": Scenario("detect", "tree", "flood", "\n"),
    "spaces without end": Scenario("detect", "tree", "flood", " "),
    "an answer five thousand times": Scenario("clean", "hello", "twice"),
    "silence at first": late("detect", "hello"),
    "silence later": late("detect", "describe"),
    "silence at the end": late("clean", "clean"),
    "a byte at a time": late("detect", "hello", "drip", '{"python": "'),
    "a byte at a time, later": late("detect", "describe", "drip", '{"a": '),
    "stderr without end": late("detect", "hello", "errors"),
    "stderr without end, later": late("detect", "describe", "errors"),
    "its output is closed": Scenario("detect", "hello", "close"),
    "its output is closed, later": Scenario("detect", "describe", "close"),
    "a file that is not read": late("verify", "put", absent=True),
    "a program that is not taken": late("detect", "send", absent=True),
    "much on stderr, then all is well": Scenario("clean", "hello", "many errors", "e" * 65536, code=0),
    "many lines on stderr, then all is well": Scenario("clean", "hello", "many errors", RAW + "\n", code=0),
    # How the program ends.
    "an end with a long line": Scenario("detect", "hello", "end", [255, "e" * 60_000]),
    "an end with escapes": Scenario("detect", "hello", "end", [1, RAW]),
    "an end of the link with escapes": Scenario("detect", "describe", "end", [255, RAW]),
    "it ends well before it answers": Scenario("detect", "describe", "end", [0, ""]),
    # JSON.
    "half an answer": Scenario("detect", "describe", "text", "x" * 100 + "\n"),
    "a list": Scenario("detect", "hello", "text", "[]\n"),
    "nested deeply": Scenario("detect", "hello", "text", deep(100_000)),
    "many lists": Scenario("detect", "describe", "text", '{"a":[' + "[]," * 600_000 + "0]}\n"),
    "many tables": Scenario("detect", "describe", "text", '{"a":[' + '{"":0},' * 250_000 + "0]}\n"),
    "many numbers": Scenario("detect", "tree", "text", '{"path":[' + "1," * 900_000 + "0]}\n"),
    "no text": Scenario("detect", "hello", "text", '{"a":"\xff\xfe"}\n'),
    "half a character": Scenario("detect", "hello", "text", '{"folder":"\\ud800"}\n'),
    "NaN": Scenario("detect", "hello", "text", '{"free":NaN}\n'),
    "a number of many digits": Scenario("detect", "hello", "text", '{"free":' + "9" * 10_000 + "}\n"),
    "a key twice": Scenario("detect", "hello", "text", '{"free":1,"free":2}\n'),
    # The board's description of itself.
    "a folder of a megabyte": change("detect", "hello", (("folder",), "/" * 1_000_000)),
    "a folder with a null byte": change("clean", "hello", (("folder",), "/b\0c"), code=0),
    "a token of a megabyte": change("detect", "hello", (("token",), "t" * 1_000_000)),
    "paths of a megabyte": change("detect", "hello", (("paths",), ["/p"] * 50_000)),
    "a holder since the year 10^11": change("detect", "hello", (("busy",), {"who": "x", "since": 1 << 62})),
    "a holder with escapes": change("detect", "hello", (("busy",), {"who": ESC, "since": 1})),
    "a Python with a line break": change("detect", "hello", (("python",), "3.11\nall is well")),
    "an error with escapes": Scenario("detect", "describe", "text", json.dumps({"error": ESC + "\n" + ESC}) + "\n"),
    "an error of a megabyte": Scenario("detect", "describe", "text", json.dumps({"error": "e" * 1_000_000}) + "\n"),
    "an error that is a table": Scenario("detect", "tree", "text", '{"error":{"a":[1]},"free":"x"}\n'),
    "negative space": change("detect", "describe", (("state", "free_bytes"), -1)),
    "a clock of 10^300": change("detect", "describe", (("state", "clock_mhz"), 1e300)),
    "colder than cold": change("detect", "describe", (("state", "temperature_c"), {"z": -1e6})),
    "20,000 files": change("detect", "describe", (("files",), MANY_FILES)),
    "files elsewhere": change(
        *("detect", "describe"),
        *((("files", f"{way}/owned"), "x") for way in ("..", "proc/..", "proc/./..", "/tmp", "proc//tmp", "sys/../..")),
        code=0,
    ),
    "a file that is a folder": change("detect", "describe", (("files",), {"proc/a": "x", "proc/a/b": "x"})),
    "a file with a long name": change("detect", "describe", (("files", "proc/" + "n" * 5000), "x")),
    "a file of a megabyte": change("detect", "describe", (("files", "proc/meminfo"), "M" * 1_000_000)),
    "control groups elsewhere": change(
        "detect", "describe", (("files", "proc/self/cgroup"), "0::/../../../../../../../../tmp\n"), code=0
    ),
    "control groups of many folders": change(
        "detect", "describe", (("files", "proc/self/cgroup"), "0::" + "/a" * 4000)
    ),
    "memory of 4,000 digits": change("detect", "describe", (("files", "proc/meminfo"), "MemTotal: " + "9" * 4000)),
    "negative memory": change("detect", "describe", (("files", "proc/meminfo"), "MemTotal: -5 kB\n")),
    "registers of 60 bits": change(
        "detect",
        "describe",
        (("evidence", "cpuid"), {"leaves": [[1 << 60] * 6], "xcr0": 7}),
        (("evidence", "machine"), "x86_64"),
    ),
    "2^62 threads": change("detect", "describe", (("affinity",), 1 << 62)),
    "an engine with a line break": change("detect", "describe", (("engines", "openvino", "problem"), "a\nb")),
    "escapes in names": change(
        "detect", "describe", (("os",), ESC), (("state", "governors"), [ESC]), (("versions", ESC), ESC), code=0
    ),
    # The program that runs models.
    "frames: silence": late("eval", "open"),
    "frames: a byte at a time": late("eval", "open", "drip", "\x00\x00\x10\x00{"),
    "frames: stderr without end": late("eval", "run", "errors"),
    "frames: output is closed": Scenario("eval", "run", "close"),
    "frames: a flood": Scenario("eval", "open", "flood", "\xff"),
    "frames: zeros": Scenario("eval", "open", "flood", "\x00"),
    "frames: one of 16 MB": Scenario("eval", "open", "flood", "\x00\x00\x00\x01"),
    "frames: nested deeply": Scenario("eval", "open", "text", "\x00\x00\x02\x00" + '{"a":' + "[" * 131_067),
    "frames: no JSON": Scenario("eval", "open", "text", FRAME + "x" * 16),
    "frames: no arrays": Scenario("eval", "open", "text", "\x02\x00\x00\x00{}"),
    "frames: half of one": late("eval", "run", "text", "\x00\x00\x01\x00{"),
    "an array of 4 GB": Scenario("eval", "run", "arrays", [[["logits", "<f4", [1 << 30]]], 64 << 20]),
    "many arrays of 64 MB": Scenario("eval", "run", "arrays", [[["logits", "<f4", [1 << 24]]] * 40, 2560 << 20]),
    "10,000 arrays": Scenario("eval", "run", "arrays", [[[f"a{i}", "<f4", [1]] for i in range(10_000)], 0]),
    "arrays that nobody asked for": Scenario("eval", "open", "arrays", [[["x", "<f4", [1 << 24]]], 64 << 20]),
    "an array of objects": Scenario("eval", "run", "arrays", [[["logits", "|O8", [1]]], 0]),
    "an array of structures": Scenario("eval", "run", "arrays", [[["logits", "f8," * 9_999 + "f8", [1]]], 0]),
    "an array of nothing": Scenario("eval", "run", "arrays", [[["logits", "<f4", [0, 1 << 61, 1 << 61]]], 0]),
    "an array of negative size": Scenario("eval", "run", "arrays", [[["logits", "<f4", [-1]]], 0]),
    "an array of 10,000 dimensions": Scenario("eval", "run", "arrays", [[["logits", "<f4", [1] * 10_000]], 1 << 20]),
    "no output": Scenario("eval", "run", "arrays", [[], 0]),
    "an error of a run with escapes": Scenario("eval", "run", "text", "", code=4),
    "an output of texts": Scenario("eval", "run", "arrays", [[["logits", "<U4", [2, 10]]], 320]),
    "an output of complex numbers": Scenario("eval", "run", "arrays", [[["logits", "<c8", [2, 10]]], 160]),
    "another shape": Scenario("eval", "run", "arrays", [[["logits", "<f4", [1 << 20]]], 4 << 20], code=0),
    "a scalar": Scenario("eval", "run", "arrays", [[["logits", "<f4", []]], 4], code=0),
    "no session": change("eval", "open", (("session",), None)),
    "other inputs": change("eval", "open", (("inputs",), [[ESC, "tensor(float)", [1]]])),
    "a type with escapes": change("eval", "open", (("outputs",), [["logits", ESC, [1]]]), code=0),
    # Figures.
    "a negative latency": change("bench", "bench", ((*FIGURES, "p50_ms"), -1.0)),
    "a latency of 10^300": change("bench", "bench", ((*FIGURES, "p999_ms"), 1e300)),
    "no scenarios": change("bench", "bench", (("scenarios",), {})),
    "other scenarios": change("bench", "bench", (("scenarios", "x" * 100), {"models": {}})),
    "other models": change("bench", "bench", (("models", "owned"), {"memory": None})),
    "100,000 notes": change("bench", "bench", (("notes",), ["n"] * 100_000)),
    "a note that forges lines": change("bench", "bench", (("notes",), [ESC + "\nall variants passed"]), code=0),
    "an error of a benchmark": Scenario("bench", "bench", "text", ""),
    "silence in a benchmark": late("bench", "bench"),
    "a benchmark without end": late("bench", "bench", "drip", "\x00\x00\x10\x00{"),
    "other versions": change("bench", "bench", (("versions",), {ESC: ESC}), code=0),
    # The bundle's runner.
    "a runner without end": Scenario("verify", "edgeq_run.py", "flood", "v"),
    "a runner that says nothing": late("verify", "edgeq_run.py"),
    "a runner that floods stderr": late("verify", "edgeq_run.py", "errors"),
    "a runner that fails with escapes": Scenario("verify", "edgeq_run.py", "end", [1, RAW]),
    "another bundle's hash": change("verify", "edgeq_run.py", (("manifest_sha256",), "0" * 64)),
    "no variants": change("verify", "edgeq_run.py", (("variants",), [])),
    "a passed bundle of which nothing ran": change(
        "verify", "edgeq_run.py", *((("variants", i, "status"), "not run") for i in range(2))
    ),
    "a status that forges lines": change("verify", "edgeq_run.py", (("variants", 0, "status"), "passed\nall is well")),
    "a reason that forges lines": change("verify", "edgeq_run.py", (("variants", 0, "reason"), ESC + "\nok"), code=0),
    # Setup of an environment.
    "pip floods stdout": Scenario("setup", "pip", "flood", "p"),
    "pip fails with escapes": Scenario("setup", "pip", "end", [1, RAW + "e" * 60_000]),
    "no environment, with escapes": Scenario("setup", "venv", "end", [1, RAW * 1000]),
    # The doctor. Each of its checks is a line, and a failed check gives exit code 10.
    "a doctor's board without end": Scenario("doctor", "describe", "flood", "1", code=10),
    "versions with escapes": change("doctor", "hello", (("modules",), {"numpy": ESC, "onnxruntime": ESC}), code=10),
    "an answer that dwarfs the demo's": Scenario(
        "doctor", "run", "arrays", [[["logits", "<f4", [1 << 22, 1]]], 16 << 20], code=10
    ),
    # Tuning.
    "a race of others": change("race", "race", (("order",), ["b"]), (("runners",), {"b": {}})),
    "a race without samples": Scenario("race", "race", "arrays", [[["0 samples_ms", "<f8", [0]]], 0]),
    "a race of 2 GB": Scenario("race", "race", "arrays", [[["0 samples_ms", "<f8", [1 << 28]]], 2048 << 20]),
    "a race that never ends": late("race", "race"),
    "a negative peak": change("peak", "peak", (("session_peak_bytes",), -1)),
    "a profile of 2 GB": Scenario("profile", "read", "arrays", [[["content", "|u1", [1 << 31]]], 2048 << 20]),
    "a profile of nothing": Scenario("profile", "read", "arrays", [[["content", "|u1", [1 << 20]]], 1 << 20]),
    "a profile that is not a JSON": Scenario("profile", "read", "bytes", "x_kernel_time\n"),
    "a kernel of negative time": Scenario("profile", "read", "bytes", kernel(dur=-1)),
    "a kernel with another operator": Scenario("profile", "read", "bytes", kernel(args={"op_name": ["a"]})),
    "a profile of many kernels": Scenario("profile", "read", "bytes", kernel() * 2_000),
    "a profile nested deeply": Scenario("profile", "read", "bytes", kernel(args=json.loads("[" * 60 + "]" * 60))),
    "an optimised model that is none": Scenario("profile", "read", "bytes", kernel()),
    "a profile without a name": change(
        "profile", "end profiling", (("profile",), {"a": ESC}), (("error",), {"b": ESC})
    ),
}


def error(kind: str) -> str:
    """Return a frame with an error of the runtime."""
    text = json.dumps({"error": f"{ESC}\n{'x' * 100_000}", "kind": kind, "arrays": []})
    return len(text).to_bytes(4, "little").decode("latin-1") + text


@pytest.fixture(scope="session")
def canned(bundle: Path) -> dict[str, Any]:
    """Return honest answers to all requests. Those for a benchmark and for the bundle's runner are made here."""
    commands = {
        "bench": ("bench", demo.MODEL, "--duration", "0.02", "--queries", "3"),
        "edgeq_run.py": ("verify", bundle),
    }
    found = dict(HONEST)
    for name, command in commands.items():
        done = CliRunner().invoke(group, [*map(str, command), "--json"])
        assert done.exit_code == 0, done.output
        found[name] = json.loads(done.stdout)
    return found


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of programs, which contains `ssh`. All temporary files go next to it."""
    programs, temporary = tmp_path / "programs", tmp_path / "temporary"
    programs.mkdir()
    temporary.mkdir()
    source = Path(__file__).with_name("hostile_ssh.py").read_text("utf-8")
    ssh = programs / "ssh"
    ssh.write_text(f"#!{sys.executable} -IS\n{source}")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setattr("platformdirs.user_config_path", lambda app: tmp_path / "config")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr("edgeq.remote.session._SHORT", str(temporary))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bounds, "KERNELS", 1000)
    for name in ("ALIVE_S", "EXIT_S"):
        monkeypatch.setattr(bounds, name, 0.1)
    return programs


def limit_s(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set all deadlines to `seconds`."""
    for name in ("ANSWER_S", "REQUEST_S", "COMMAND_S", "VERIFY_S", "BENCH_S"):
        monkeypatch.setattr(bounds, name, seconds)
    monkeypatch.setattr(bounds, "BENCH_FACTOR", 0.0)


def run(command: str, bundle: Path) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a command, or of a part of `tune`."""
    samples = ("--data", demo.CALIBRATION, "--count", "2")
    commands: dict[str, tuple[object, ...]] = {
        "detect": ("detect", "--on", BOARD),
        "clean": ("device", "clean", BOARD),
        "setup": ("device", "setup", BOARD),
        "doctor": ("doctor", "--on", BOARD),
        "verify": ("verify", bundle, "--on", BOARD, "-q"),
        "eval": ("eval", demo.MODEL, "--on", BOARD, *samples, "--reference", demo.MODEL, "-q"),
        "bench": ("bench", demo.MODEL, "--on", BOARD, "--duration", "0.02", "-q"),
    }
    if command in commands:
        done = CliRunner().invoke(group, [str(word) for word in commands[command]])
        return done.exit_code, done.stdout, done.stderr
    try:
        with BoardClock([find_board(BOARD)]) as clock:
            if command == "race":
                clock.race({"a": (demo.MODEL, SessionSettings())}, {}, FEW, lambda: None)
            elif command == "peak":
                clock.peak_memory(demo.MODEL, SessionSettings(), {})
            else:
                profile(demo.MODEL, SessionSettings(), {}, opener=clock.open_profiled)
    except EdgeqError as problem:
        return problem.exit_code, "", f"{problem}\n"
    return 0, "", ""


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def resident(name: str) -> int:
    """Return this process's memory in bytes: VmRSS is the current value, VmHWM the peak since `reset_peak`."""
    text = Path("/proc/self/status").read_text("ascii")
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(name))


def eventually(condition: Any) -> bool:
    end = time.monotonic() + 3.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory by Linux's /proc")
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_hostile_board(
    name: str, links: Path, canned: Mapping[str, Any], bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = SCENARIOS[name]
    given = scenario.given
    if "an error of a" in name and scenario.act == "text" and not given:
        given = error("ValueError")
    limit_s(0.5 if scenario.hurry else 20.0, monkeypatch)
    plan = {"at": scenario.at, "act": scenario.act, "given": given, "canned": canned, "absent": scenario.absent}
    (links / "scenario.json").write_text(json.dumps(plan))
    (links / "links").touch()
    before, threads = files(tmp_path), set(threading.enumerate())
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    base, begin = resident("VmRSS"), time.monotonic()

    code, stdout, stderr = run(scenario.command, bundle)

    taken, memory = time.monotonic() - begin, resident("VmHWM") - base
    assert code == scenario.code, (stdout, stderr)
    assert memory < MOST_BYTES, f"{memory >> 20} MiB"
    assert taken < SLACK_S, f"{taken:.1f} s"
    assert ("does not answer within" in stderr) == scenario.hurry
    assert all(c.isprintable() or c in "\n" for c in stdout + stderr)
    assert len(stdout) + len(stderr) < 4000
    if code == BoardError.exit_code:
        assert stdout == ""
        assert stderr.count("\n") == 1, stderr
    assert "all variants passed" not in (stdout + stderr).splitlines()
    assert files(tmp_path) == before
    pids = (links / "links").read_text().split()
    assert pids
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert eventually(lambda: set(threading.enumerate()) <= threads)
