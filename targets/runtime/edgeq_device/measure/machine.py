"""Describe the machine for the report of a measurement."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any, Dict

from edgeq_device.measure.environment import read_governors
from edgeq_device.system.features import ROOT, read_allowed_cores, read_text


def read_cpu_name(root: Path = ROOT) -> str:
    """Return the processor's name from /proc/cpuinfo or from Windows, or else the name of its architecture."""
    info = read_text(root / "proc/cpuinfo") or ""
    # The key differs between architectures.
    match = re.search(r"^(?:model name|Model|Hardware|cpu model)\s*:\s*(.+)$", info, re.M)
    return match.group(1).strip() if match else os.environ.get("PROCESSOR_IDENTIFIER") or platform.machine()


def describe_machine(root: Path = ROOT) -> Dict[str, Any]:
    """Return a description of the machine under stable names, for a report."""
    return {
        "cpu_name": read_cpu_name(root),
        "architecture": platform.machine(),
        "os": platform.system(),
        "threads": os.cpu_count(),
        "allowed_cores": list(read_allowed_cores()),
        "governors": list(read_governors(root)),
    }
