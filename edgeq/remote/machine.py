"""Describe a board from the data that it reports.

edgeq interprets this data by the same rules as the data of its own machine.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from edgeq_device.engines.catalog import parse_version
from edgeq_device.system.features import Answers, Evidence
from edgeq_device.system.gpus import Gpu
from edgeq_device.system.places import scratch_folder
from msgspec import Meta

from edgeq.errors import BoardError
from edgeq.hardware import detect
from edgeq.hardware.detect import PACKAGES, Machine, describe, find_runtimes
from edgeq.hardware.engines import Installed
from edgeq.remote import link
from edgeq.remote.devices import Board
from edgeq.remote.link import Line, SystemFile, Text
from edgeq.remote.session import BoardSession, open_board
from edgeq.util.records import Count, parse

# The system files that edgeq/hardware/detect.py can read. No other file from a board is written to this machine.
_SYSTEM_FILE = re.compile(r"(proc|sys)(/(?!\.\.?(/|$))[\w.:@-]+)+")
# Far above any machine (64 PiB of memory, 1 TiB of cache). A larger number from a board is an error or an attack.
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
    """Hold the information on the CPU that a board reports. See `edgeq_device.system.features.Evidence`."""

    system: Line
    machine: Line
    cpuinfo: str
    auxv: Base64
    sysctl: str
    cpuid: Cpuid | None


@dataclass(frozen=True)
class ReportedGpu:
    """Describe a GPU that a board reports. See `edgeq_device.system.gpus.Gpu`."""

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
    """Describe a board: its machine, its engines, and its state.

    Attributes:
        modules: versions of numpy and onnxruntime in the Python that edgeq uses there.
        compatible: names of the board and of its chip in the device tree, the most exact one first.
    """

    machine: Machine
    engines: Mapping[str, Installed]
    state: BoardState
    modules: Mapping[str, str] = field(default_factory=dict)
    compatible: tuple[str, ...] = ()


def describe_board(session: BoardSession) -> Description:
    """Get a board's description from the board.

    Raises:
        BoardError: the board does not answer, or its answer makes no sense.
    """
    answer = session.ask({"do": "describe", "runtime": session.send_runtime(), "packages": PACKAGES})
    reported = parse(answer, _Described, session.board.name, BoardError)
    try:
        info = _build_machine(reported, session.hello.python)
        # py-cpuinfo would only add CPUID's answers, and the evidence already contains these.
        machine = describe(_build_evidence(reported.evidence), {}, info)
    except (ValueError, LookupError, OverflowError, OSError) as error:
        problem = f"{session.board.name}: its system files are not valid ({link.shorten(error)})"
        raise BoardError(problem) from error
    engines = {name: Installed(engine.version, engine.problem) for name, engine in reported.engines.items()}
    compatible = reported.files.get("proc/device-tree/compatible", "").split()
    return Description(machine, engines, reported.state, session.hello.modules, tuple(compatible))


def record_board(session: BoardSession, initial: Description, final: Description | None = None) -> dict[str, Any]:
    """Return the record of a board that is stored with the measurements made on it."""
    return {
        "name": session.board.name,
        "kind": session.board.kind,
        "machine": initial.machine,
        "before": initial.state,
        "after": (final or initial).state,
        "bytes_sent": session.channel.sent,
    }


def _build_evidence(reported: ReportedCpu) -> Evidence:
    answers = None
    if reported.cpuid is not None:
        # The keys are pairs, which JSON cannot have, so the board sends rows.
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


def _build_machine(reported: _Described, python: str) -> Machine:
    """Return the description of the board's machine, except for its CPU.

    The board's system files are written to a temporary folder on this machine. The functions that otherwise read this
    machine's own files read them there.
    """
    gpus = tuple(
        Gpu(gpu.name, parse_version(gpu.compute_capability)[:2], gpu.memory_bytes, gpu.driver)  # type: ignore[arg-type]
        for gpu in reported.gpus
    )
    with scratch_folder("edgeq-board-") as folder:
        root = Path(folder)
        for name, text in reported.files.items():
            # A name such as "../.ssh/config" must not become a path on this machine.
            if _SYSTEM_FILE.fullmatch(name):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, "utf-8")
        caches, memory = detect.read_caches(root), detect.read_memory(root)
        # These numbers later become sizes of buffers and lines of a report.
        if not 0 <= memory <= _LARGEST_BYTES or any(cache.size > _LARGEST_CACHE for cache in caches):
            raise ValueError("sizes that no machine has")
        return Machine(
            board=detect.read_board(root),
            usable_threads=detect.count_threads(root, reported.affinity),
            caches=caches,
            memory_bytes=memory,
            os=reported.os,
            gpus=gpus,
            runtimes=find_runtimes(reported.versions, python),
        )


def detect_board(board: Board) -> Description:
    """Connect to a board and return its description. For this, the board needs neither numpy nor onnxruntime.

    Raises:
        BoardError: the board cannot be used.
    """
    with open_board(board) as session:
        return describe_board(session)
