"""Describe a board from the data that it reports.

edgeq interprets this data by the same rules as the data of its own machine.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import onnx
from edgeq_device.engines.catalog import parse_version
from edgeq_device.engines.cuda import Gpu
from edgeq_device.errors import DeviceError
from edgeq_device.measure.features import Answers, Evidence
from edgeq_device.system.places import scratch_folder
from edgeq_device.system.plainjson import parse_json
from google.protobuf.message import DecodeError
from msgspec import Meta

from edgeq import demo
from edgeq.backends.base import DoctorCheck, Status
from edgeq.errors import BoardError, DataError, RuntimeUnavailableError, one_line
from edgeq.hardware import detect
from edgeq.hardware.detect import PACKAGES, Machine, describe, runtimes_among
from edgeq.hardware.engines import Installed, detect_engines, hardware_problem, simulates
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.measure.comparison import decibels
from edgeq.prove.engine_check import LEAST_DB, EngineDiagnosis
from edgeq.remote import link
from edgeq.remote.devices import Board
from edgeq.remote.link import Line, SystemFile, Text, without_controls
from edgeq.remote.session import BoardModels, BoardSession, open_board
from edgeq.run.engines import load_engines
from edgeq.run.session import SessionSettings, onnxruntime, open_session
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import Count, parse

# The system files that edgeq/hardware/detect.py can read. No other file from a board is written to this machine.
_SYSTEM_FILE = re.compile(r"(proc|sys)(/(?!\.\.?(/|$))[\w.:@-]+)+")
_LARGEST_BYTES, _LARGEST_CACHE = 1 << 56, 1 << 40
Base64 = Annotated[str, Meta(pattern=r"^[A-Za-z0-9+/]*=*$", max_length=1 << 16)]
Register = Annotated[int, Meta(ge=0, lt=1 << 32)]
Bytes = Annotated[int, Meta(ge=0, le=_LARGEST_BYTES)]
Small = Annotated[float, Meta(ge=0, le=1e6)]
"""A clock in megahertz, or a load."""
Degrees = Annotated[float, Meta(ge=-273.15, le=1e4)]


@dataclass(frozen=True)
class Cpuid:
    """Hold CPUID's answers (leaf, subleaf, EAX, EBX, ECX and EDX for each) and the register XCR0."""

    leaves: Annotated[
        tuple[tuple[Register, Register, Register, Register, Register, Register], ...], Meta(max_length=4096)
    ]
    xcr0: Count


@dataclass(frozen=True)
class ReportedCpu:
    """Hold the information on the CPU that a board reports. See `edgeq_device.measure.features.Evidence`."""

    system: Line
    machine: Line
    cpuinfo: str
    auxv: Base64
    sysctl: str
    cpuid: Cpuid | None


@dataclass(frozen=True)
class ReportedGpu:
    """Describe a GPU that a board reports. See `edgeq_device.engines.cuda.Gpu`."""

    name: Line
    compute_capability: Annotated[str, Meta(pattern=r"^\d{1,3}\.\d{1,3}$")]
    memory_bytes: Bytes | None
    driver: Line


@dataclass(frozen=True)
class BoardState:
    """Describe the state of a board. A value is None if the board's system does not report it.

    Attributes:
        clock_mhz: current clock of the fastest core.
        temperature_c: temperature of each thermal zone, in degrees Celsius.
        thermal_throttles: number of times that cores were throttled because of heat since the board started.
        load: average load over the last minute.
        free_bytes: free space for edgeq's directory.
    """

    clock_mhz: Small | None = None
    governors: Annotated[tuple[Line, ...], Meta(max_length=16)] = ()
    temperature_c: Annotated[Mapping[Line, Degrees], Meta(max_length=1024)] = field(default_factory=dict)
    thermal_throttles: Count | None = None
    load: Small | None = None
    free_bytes: Bytes = 0

    def text(self) -> str:
        """Return the state as one line for the user."""
        hottest = max(self.temperature_c.values(), default=None)
        parts = (
            f"{self.clock_mhz:.0f} MHz" if self.clock_mhz else "",
            ", ".join(self.governors),
            f"{hottest:.0f} degrees C" if hottest is not None else "",
            f"throttled {self.thermal_throttles} times since its start" if self.thermal_throttles else "",
            f"load {self.load:.2f}" if self.load is not None else "",
            f"{self.free_bytes / 1e9:.1f} GB free",
        )
        return "; ".join(part for part in parts if part)


@dataclass(frozen=True)
class _Engine:
    """Describe an engine that a board reports. See `edgeq.hardware.engines.Installed`."""

    version: Line
    problem: Text


@dataclass(frozen=True)
class _Described:
    evidence: ReportedCpu
    files: Annotated[Mapping[str, SystemFile], Meta(max_length=link.SYSTEM_FILES)]
    affinity: Annotated[int, Meta(ge=0, le=1 << 16)]
    os: Line
    versions: Mapping[Line, Line]
    engines: Mapping[Line, _Engine]
    gpus: Annotated[tuple[ReportedGpu, ...], Meta(max_length=64)]
    state: BoardState


@dataclass(frozen=True)
class Description:
    """Describe a board: its machine, its engines, and its state."""

    machine: Machine
    engines: Mapping[str, Installed]
    state: BoardState


def describe_board(session: BoardSession) -> Description:
    """Get a board's description from the board.

    Raises:
        BoardError: the board does not answer, or its answer makes no sense.
    """
    answer = session.ask({"do": "describe", "runtime": session.runtime(), "packages": PACKAGES})
    found = parse(answer, _Described, session.board.name, BoardError)
    try:
        info = _system(found, session.hello.python)
        # py-cpuinfo would only add CPUID's answers, and the evidence already contains these.
        machine = describe(_evidence(found.evidence), {}, info)
    except (ValueError, LookupError, OverflowError, OSError) as error:
        problem = f"{session.board.name}: its system files are not valid ({link.brief(error)})"
        raise BoardError(problem) from error
    engines = {name: Installed(engine.version, engine.problem) for name, engine in found.engines.items()}
    return Description(machine, engines, found.state)


def board_record(session: BoardSession, before: Description, after: Description | None = None) -> dict[str, Any]:
    """Return the record of a board that is stored with the measurements made on it."""
    return {
        "name": session.board.name,
        "kind": session.board.kind,
        "machine": before.machine,
        "before": before.state,
        "after": (after or before).state,
        "bytes_sent": session.channel.sent,
    }


def _evidence(reported: ReportedCpu) -> Evidence:
    answers = None
    if reported.cpuid is not None:
        leaves = {(leaf, sub): registers for leaf, sub, *registers in reported.cpuid.leaves}
        answers = Answers({key: tuple(r) for key, r in leaves.items()}, reported.cpuid.xcr0)  # type: ignore[misc]
    return Evidence(
        reported.system,
        reported.machine,
        cpuinfo=reported.cpuinfo,
        auxv=base64.b64decode(reported.auxv),
        sysctl=reported.sysctl,
        cpuid=answers,
    )


def _system(found: _Described, python: str) -> Machine:
    """Return the description of the board's machine, except for its CPU.

    The board's system files are written to a temporary folder on this machine. The functions that otherwise read this
    machine's own files read them there.
    """
    gpus = tuple(
        Gpu(gpu.name, parse_version(gpu.compute_capability)[:2], gpu.memory_bytes, gpu.driver)  # type: ignore[arg-type]
        for gpu in found.gpus
    )
    with scratch_folder("edgeq-board-") as folder:
        root = Path(folder)
        for name, text in found.files.items():
            if _SYSTEM_FILE.fullmatch(name):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, "utf-8")
        caches, memory = detect.caches(root), detect.memory_bytes(root)
        if not 0 <= memory <= _LARGEST_BYTES or any(cache.size > _LARGEST_CACHE for cache in caches):
            raise ValueError("sizes that no machine has")
        return Machine(
            board=detect.board(root),
            usable_threads=detect.usable_threads(root, found.affinity),
            caches=caches,
            memory_bytes=memory,
            os=found.os,
            gpus=gpus,
            runtimes=runtimes_among(found.versions, python),
        )


_KERNEL = b"_kernel_time"
_LONGEST_LINE = 1 << 16
_GROWTH, _FIRST = 8, 1 << 20
_Typed = Mapping[Line, tuple[int, ...]]


@dataclass(frozen=True)
class _Arguments:
    op_name: Line
    input_type_shape: tuple[_Typed, ...] = ()
    output_type_shape: tuple[_Typed, ...] = ()


@dataclass(frozen=True)
class _Run:
    """Describe an event of a kernel in onnxruntime's profile. `dur` is in microseconds."""

    cat: Literal["Node"]
    name: Text
    dur: Annotated[float, Meta(ge=0, le=1e12)]
    args: _Arguments


def kernel_events(profile: bytes) -> bytes:
    """Return the events of kernels in onnxruntime's profile, reduced to the fields that edgeq reads.

    Args:
        profile: JSON with one event on each line.

    Raises:
        ValueError: an event is not valid, or there are more events than `link.KERNELS`.
    """
    kept: list[str] = []
    stream = io.BytesIO(profile)
    while line := stream.readline(_LONGEST_LINE):
        if _KERNEL not in line:
            continue
        if len(kept) == link.KERNELS:
            raise ValueError(f"more than {link.KERNELS} runs of kernels")
        try:
            event = parse_json(line.strip().rstrip(b","), "a profile", values=link.KERNEL_VALUES)
            run = parse(event, _Run, "a profile", BoardError)
        except (DeviceError, BoardError) as error:
            raise ValueError(str(error)) from error
        read = {"op_name", "input_type_shape", "output_type_shape"} & event["args"].keys()
        known = {"cat": run.cat, "name": run.name, "dur": run.dur, "args": {key: event["args"][key] for key in read}}
        kept.append(json.dumps(without_controls(known)))
    return f"[{','.join(kept)}]".encode()


def check_graph(model: bytes, original: int) -> None:
    """Refuse an optimised model that is not a valid model, or that is far larger than its source.

    Args:
        original: size in bytes of the model from which it was made.

    Raises:
        ValueError: the model is refused.
    """
    if len(model) > _FIRST + _GROWTH * original:
        raise ValueError(f"an optimised model of {len(model)} bytes")
    try:
        onnx.load_model_from_string(model)
    except DecodeError as error:
        raise ValueError("the optimised model is not a model") from error


_PACKAGES = ("numpy", "onnxruntime")


@dataclass(frozen=True)
class DeviceSetUp:
    """Report the private environment on a board, with its folder and its versions.

    Attributes:
        engines: the packages to install for other hardware of the board.
    """

    device: str
    folder: str
    python: str
    numpy: str
    onnxruntime: str
    engines: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return lines of text that describe the result to the user."""
        versions = f"Python {self.python}, numpy {self.numpy}, onnxruntime {self.onnxruntime}"
        return [f"{self.device}: {versions} in {self.folder}/venv", *self.engines]


@dataclass(frozen=True)
class DeviceCleaned:
    """Report that edgeq's folder was removed from a board.

    Attributes:
        bytes: size of the removed folder.
    """

    device: str
    folder: str
    bytes: Count

    def lines(self) -> list[str]:
        """Return lines of text that describe the result to the user."""
        return [f"{self.device}: {self.folder} is removed ({self.bytes / 1e6:.1f} MB)"]


def set_up(board: Board, *, wheels: Path | None = None, progress: Progress = SILENT) -> DeviceSetUp:
    """Make an environment with numpy and onnxruntime on a board.

    The environment gets the newest onnxruntime that is not newer than the onnxruntime on this machine.

    Args:
        wheels: a folder of wheels to install from, if the board's pip cannot reach a package index.

    Raises:
        BoardError: the environment cannot be made; the message names the packages or files to install or copy.
        DataError: there are no wheels in the folder.
    """
    with open_board(board) as session:
        folder = session.hello.folder
        with progress.stage(f"making an environment on {board.name}"):
            _make(session, f"{folder}/venv")
            options: tuple[str, ...] = ()
            if wheels is not None:
                files = {file.name: file for file in sorted(wheels.glob("*.whl"))}
                if not files:
                    raise DataError(f"{wheels} has no wheels", "Get them with pip download")
                options = "--no-index", "--find-links", session.send(files, keep=False, progress=progress)
            pip = (f"{folder}/venv/bin/python", "-I", "-m", "pip", "--disable-pip-version-check", "--no-input")
            newest = f"onnxruntime<={onnxruntime().__version__}"
            code, _, last = session.run(
                *pip, "install", "--no-cache-dir", "-q", *options, "numpy", newest, limit_s=link.INSTALL_S
            )
        if code:
            session.run("rm", "-rf", f"{folder}/venv", limit_s=60)
            raise BoardError(f"{board.name}: pip failed: {last}", _what_to_copy(session, newest))
    with open_board(board) as session:
        session.require(*_PACKAGES)
        found = describe_board(session)
        versions = {name: session.hello.modules[name] for name in _PACKAGES}
        return DeviceSetUp(board.name, folder, session.hello.python, **versions, engines=tuple(_missing(found)))


def _missing(found: Description) -> Iterator[str]:
    """Yield the package to install for each engine that the board has hardware for, judged by the board's name."""
    known = load_engines()
    for state in detect_engines(found.machine, known, found.engines):
        if known[state.name].boards and not state.version:
            yield f"for {state.title}: {state.install}. {known[state.name].driver}"


def clean(board: Board) -> DeviceCleaned:
    """Remove everything that edgeq keeps on a board.

    Raises:
        BoardError: the board cannot be reached, or somebody is using it.
    """
    with open_board(board) as session:
        place = {"device": board.name, "folder": session.hello.folder}
        return parse({**session.ask({"do": "clean"}), **place}, DeviceCleaned, board.name, BoardError)


def _make(session: BoardSession, place: str) -> None:
    code, out, last = session.run(*session.board.python, "-I", "-m", "venv", "--clear", place, limit_s=600)
    if code == 0:
        return
    session.run("rm", "-rf", place, limit_s=60)
    text = one_line(out.decode("utf-8", "replace") + last)
    missing = "ensurepip" in text or "No module named venv" in text
    reason = "venv is missing" if missing else one_line(text, most=200)
    raise BoardError(
        f"{session.board.name}: its Python makes no environment ({reason})",
        "Install python3-venv there, or install numpy and onnxruntime for that Python",
    )


def _what_to_copy(session: BoardSession, newest: str) -> str:
    code, machine, _ = session.run("uname", "-m", limit_s=30)
    kind = "".join(c for c in machine.decode("utf-8", "replace") if c.isalnum() or c == "_") if code == 0 else "MACHINE"
    version = ".".join(session.hello.python.split(".")[:2])
    get = f"pip download --only-binary :all: --platform manylinux_2_28_{kind} --python-version {version}"
    again = f"edgeq device setup {shlex.quote(session.board.name)} --wheels wheels"
    return f"If it reaches no package index: {get} numpy '{newest}' -d wheels here, then {again}"


def detect_board(board: Board) -> Description:
    """Connect to a board and return its description. For this, the board needs neither numpy nor onnxruntime.

    Raises:
        BoardError: the board cannot be used.
    """
    with open_board(board) as session:
        return describe_board(session)


def doctor_board(board: Board, *, progress: Progress = SILENT) -> EngineDiagnosis:
    """Check the connection to a board, its software, its engines, and whether a model runs correctly on it.

    Each problem is reported as a failed check.
    """
    checks: list[DoctorCheck] = []
    try:
        with open_board(board) as session:
            checks.append(
                DoctorCheck("SSH", "ok", f"{board.name} is reached; edgeq writes only to {session.hello.folder}")
            )
            checks += _software(session)
            found = describe_board(session)
            match = match_profile(found.machine, load_profiles())
            checks.append(DoctorCheck("profile", "ok", f"{match.profile.name}: {match.profile.title}"))
            checks.append(DoctorCheck("state", "ok", found.state.text()))
            known = load_engines()
            for state in detect_engines(found.machine, known, found.engines):
                engine = known[state.name]
                there = state.version and not hardware_problem(engine, found.machine, state.version)
                broken = there and state.problem and not simulates(engine, found.machine)
                status: Status = "failed" if broken else "ok" if there else "absent"
                detail = state.problem or state.version or f"{state.title}: {state.install}"
                checks.append(DoctorCheck(f"engine {state.name}", status, detail))
            checks.append(_runs(session, progress))
    except BoardError as error:
        checks.append(DoctorCheck("kernels" if checks else "SSH", "failed", error.text))
    return EngineDiagnosis(tuple(checks))


def _software(session: BoardSession) -> list[DoctorCheck]:
    private = ", which edgeq device setup made" if session.hello.private else ""
    found = [DoctorCheck("Python", "ok", session.hello.python + private)]
    for name in ("numpy", "onnxruntime"):
        version = session.hello.modules.get(name)
        missing = f"edgeq device setup {session.board.name} installs it"
        found.append(DoctorCheck(name, "failed" if version is None else "ok", missing if version is None else version))
    return found


def _runs(session: BoardSession, progress: Progress) -> DoctorCheck:
    """Compare the demo model's outputs on the board with those on this machine."""
    with np.load(demo.CALIBRATION) as samples:
        feed = {"image": samples["image"][:8]}
    here = open_session(demo.MODEL).run(None, feed)[0].astype(np.float64)
    try:
        with BoardModels(session, progress) as models:
            there = models.open(demo.MODEL, SessionSettings()).run(None, feed)[0]
    except RuntimeUnavailableError as error:
        return DoctorCheck("kernels", "failed", error.text)
    if there.shape != here.shape:
        return DoctorCheck(
            "kernels", "failed", f"the demo model's output has the shape {there.shape}, not {here.shape}"
        )
    db = decibels(float((here**2).sum()), float(((there - here) ** 2).sum()))
    found = f"the demo model matches this machine's outputs to {db:.1f} dB"
    return DoctorCheck("kernels", "ok" if db >= LEAST_DB else "failed", found)
