"""Return recorded machines as the evidence that detection would collect on them today."""

from __future__ import annotations

import json
import struct
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeq_device.system.features import Answers, Evidence
from edgeq_device.system.gpus import Gpu

from edgeq.hardware.detect import Machine, describe

FOLDER = Path(__file__).parent / "machines"
RECORDS: dict[str, dict[str, Any]] = tomllib.loads((FOLDER / "machines.toml").read_text(encoding="utf-8"))


def evidence_of(record: Mapping[str, Any]) -> Evidence:
    return Evidence(
        record["system"],
        record["machine"],
        cpuinfo=_text(record, "cpuinfo"),
        auxv=auxv(*record["hwcap"]) if "hwcap" in record else b"",
        sysctl=_text(record, "sysctl"),
        windows=tuple(record.get("windows", ())),
        cpuid=answers(record["cpuid"]) if "cpuid" in record else None,
    )


def machine_of(record: Mapping[str, Any]) -> Machine:
    reported = json.loads(_text(record, "py_cpuinfo") or "{}")
    gpus = tuple(Gpu(gpu["name"], tuple(gpu["compute_capability"])) for gpu in record.get("gpus", ()))
    info = Machine(gpus=gpus, runtimes=record.get("runtimes", {}))
    return describe(evidence_of(record), reported, info)


def auxv(hwcap: int, hwcap2: int) -> bytes:
    """Return the contents of /proc/self/auxv: a page size, the two capability words, and the end mark."""
    return struct.pack("<8Q", 6, 4096, 16, hwcap, 26, hwcap2, 0, 0)


def answers(cpuid: Mapping[str, Any]) -> Answers:
    leaves = {}
    for key, registers in cpuid.items():
        if key != "xcr0":
            leaf, subleaf = key.split(".")
            leaves[int(leaf), int(subleaf)] = tuple(registers)
    return Answers(leaves, cpuid["xcr0"])


def _text(record: Mapping[str, Any], key: str) -> str:
    return (FOLDER / record[key]).read_text(encoding="utf-8") if key in record else ""
