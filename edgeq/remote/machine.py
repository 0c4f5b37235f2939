"""What a board is: its own evidence, interpreted here by the rules that this machine is judged by."""

from __future__ import annotations

import base64
import io
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import onnx
from edgeq_device import cpuid
from edgeq_device.cuda import Gpu
from edgeq_device.errors import DeviceError
from edgeq_device.features import Evidence
from edgeq_device.plainjson import parse_json
from edgeq_device.version import parse_version
from google.protobuf.message import DecodeError
from msgspec import Meta

from edgeq.errors import BoardError
from edgeq.hardware import detect
from edgeq.hardware.detect import PACKAGES, SystemInfo, describe, runtimes_among
from edgeq.hardware.engines import Installed
from edgeq.hardware.machine import Machine
from edgeq.remote import link
from edgeq.remote.channel import without_controls
from edgeq.remote.link import Line, SystemFile, Text
from edgeq.remote.session import BoardSession
from edgeq.util.records import Count, parse

# Files of the system, as the readers of edgeq/hardware/detect.py know them: nothing else is written here.
_SYSTEM_FILE = re.compile(r"(proc|sys)(/(?!\.\.?(/|$))[\w.:@-]+)+")
_LARGEST_BYTES, _LARGEST_CACHE = 1 << 56, 1 << 40
Base64 = Annotated[str, Meta(pattern=r"^[A-Za-z0-9+/]*=*$", max_length=1 << 16)]
Register = Annotated[int, Meta(ge=0, lt=1 << 32)]
Bytes = Annotated[int, Meta(ge=0, le=_LARGEST_BYTES)]
Small = Annotated[float, Meta(ge=0, le=1e6)]
"""Megahertz, a load."""
Degrees = Annotated[float, Meta(ge=-273.15, le=1e4)]


@dataclass(frozen=True)
class Cpuid:
    """CPUID's answers: leaf, subleaf, EAX, EBX, ECX, EDX each; and XCR0."""

    leaves: Annotated[
        tuple[tuple[Register, Register, Register, Register, Register, Register], ...], Meta(max_length=4096)
    ]
    xcr0: Count


@dataclass(frozen=True)
class Reported:
    """See `edgeq_device.features.Evidence`."""

    system: Line
    machine: Line
    cpuinfo: str
    auxv: Base64
    sysctl: str
    cpuid: Cpuid | None


@dataclass(frozen=True)
class ReportedGpu:
    """See `edgeq_device.cuda.Gpu`."""

    name: Line
    compute_capability: Annotated[str, Meta(pattern=r"^\d{1,3}\.\d{1,3}$")]
    memory_bytes: Bytes | None
    driver: Line


@dataclass(frozen=True)
class State:
    """What state a board is in; None where its system does not report it.

    Attributes:
        clock_mhz: of its fastest core now.
        temperature_c: degrees Celsius by thermal zone.
        thermal_throttles: how often cores were throttled for heat since it was started.
        load: average of the last minute.
        free_bytes: where edgeq's directory is.
    """

    clock_mhz: Small | None = None
    governors: Annotated[tuple[Line, ...], Meta(max_length=16)] = ()
    temperature_c: Annotated[Mapping[Line, Degrees], Meta(max_length=1024)] = field(default_factory=dict)
    thermal_throttles: Count | None = None
    load: Small | None = None
    free_bytes: Bytes = 0

    def text(self) -> str:
        """For people, in one line."""
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
    """See `edgeq.hardware.engines.Installed`."""

    version: Line
    problem: Text


@dataclass(frozen=True)
class _Described:
    evidence: Reported
    files: Annotated[Mapping[str, SystemFile], Meta(max_length=link.SYSTEM_FILES)]
    affinity: Annotated[int, Meta(ge=0, le=1 << 16)]
    os: Line
    versions: Mapping[Line, Line]
    engines: Mapping[Line, _Engine]
    gpus: Annotated[tuple[ReportedGpu, ...], Meta(max_length=64)]
    state: State


@dataclass(frozen=True)
class Description:
    """A board: the machine, the engines that it has, and the state that it is in."""

    machine: Machine
    engines: Mapping[str, Installed]
    state: State


def describe_board(session: BoardSession) -> Description:
    """What a board is.

    Raises:
        BoardError: it does not answer, or what it answers makes no sense.
    """
    answer = session.ask({"do": "describe", "runtime": session.runtime(), "packages": PACKAGES})
    found = parse(answer, _Described, session.board.name, BoardError)
    try:
        info = _system(found, session.hello.python)
        # What py-cpuinfo reads beyond the system's own files is CPUID, which is here already.
        machine = describe(_evidence(found.evidence), {}, info)
    except (ValueError, LookupError, OverflowError, OSError) as error:
        problem = f"{session.board.name}: its system files are not as they should be ({link.brief(error)})"
        raise BoardError(problem) from error
    engines = {name: Installed(engine.version, engine.problem) for name, engine in found.engines.items()}
    return Description(machine, engines, found.state)


def board_record(session: BoardSession, before: Description, after: Description | None = None) -> dict[str, Any]:
    """What is kept of a board beside what was measured on it."""
    return {
        "name": session.board.name,
        "kind": session.board.kind,
        "machine": before.machine,
        "before": before.state,
        "after": (after or before).state,
        "bytes_sent": session.sent,
    }


def _evidence(reported: Reported) -> Evidence:
    answers = None
    if reported.cpuid is not None:
        leaves = {(leaf, sub): registers for leaf, sub, *registers in reported.cpuid.leaves}
        answers = cpuid.Answers({key: tuple(r) for key, r in leaves.items()}, reported.cpuid.xcr0)  # type: ignore[misc]
    return Evidence(
        reported.system,
        reported.machine,
        cpuinfo=reported.cpuinfo,
        auxv=base64.b64decode(reported.auxv),
        sysctl=reported.sysctl,
        cpuid=answers,
    )


def _system(found: _Described, python: str) -> SystemInfo:
    """The rest, by the readers that read this machine, from the board's files under a folder."""
    gpus = tuple(
        Gpu(gpu.name, parse_version(gpu.compute_capability)[:2], gpu.memory_bytes, gpu.driver)  # type: ignore[arg-type]
        for gpu in found.gpus
    )
    with tempfile.TemporaryDirectory(prefix="edgeq-board-") as folder:
        root = Path(folder)
        for name, text in found.files.items():
            if _SYSTEM_FILE.fullmatch(name):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, "utf-8")
        caches, memory = detect.caches(root), detect.memory_bytes(root)
        if not 0 <= memory <= _LARGEST_BYTES or any(cache.size > _LARGEST_CACHE for cache in caches):
            raise ValueError("sizes that no machine has")
        return SystemInfo(
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
    """An event of onnxruntime's profile that is a kernel's; `dur`: microseconds."""

    cat: Literal["Node"]
    name: Text
    dur: Annotated[float, Meta(ge=0, le=1e12)]
    args: _Arguments


def kernel_events(profile: bytes) -> bytes:
    """Return the events of kernels in onnxruntime's profile, which has one a line, and of them what edgeq reads.

    Raises:
        ValueError: one is not as it should be, or there are more than `bounds.KERNELS`.
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
    """Refuse an optimised model that is none, or far larger than the `original` bytes of the model that it is made of.

    Raises:
        ValueError: it is refused.
    """
    if len(model) > _FIRST + _GROWTH * original:
        raise ValueError(f"an optimised model of {len(model)} bytes")
    try:
        onnx.load_model_from_string(model)
    except DecodeError as error:
        raise ValueError("the optimised model is none") from error
