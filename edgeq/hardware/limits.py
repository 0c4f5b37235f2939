"""How much of the machine this process may use: threads, memory, caches, after affinity and control groups.

Readers take the root of the file system, so that tests can give them one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from edgeq_device.environment import ROOT, allowed_cores, read_text
from edgeq_device.features import parse_identity

from edgeq.hardware.machine import Cache

_UNLIMITED = 1 << 60  # control groups v1 write "no limit" as a page-aligned number just under 2**63


def usable_threads(root: Path = ROOT, affinity: int | None = None) -> int:
    """Hardware threads by scheduler affinity (None: this process's), further limited by the control groups' CPU quota;
    at least 1."""
    quotas = [math.ceil(quota) for quota in _cpu_quotas(root)]
    return max(1, min([len(allowed_cores()) if affinity is None else affinity, *quotas]))


def memory_bytes(root: Path = ROOT) -> int:
    """Total memory of a Linux system, or the tightest control-group limit if that is lower; 0 where unknown."""
    total = 0
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limits = [limit for limit in _memory_limits(root) if limit < _UNLIMITED]
    return min([total, *limits]) if total else 0


def core_count(cpuinfo: str) -> tuple[int, int]:
    """Physical cores and hardware threads in a /proc/cpuinfo text; cores are 0 where it gives no topology."""
    blocks = [parse_identity(block) for block in cpuinfo.split("\n\n")]
    processors = [block for block in blocks if "processor" in block]
    cores = {(block.get("physical id", "0"), block["core id"]) for block in processors if "core id" in block}
    return len(cores), len(processors)


def caches(root: Path = ROOT) -> tuple[Cache, ...]:
    """Caches of the first core, from sysfs; empty where it shows none (macOS, Windows, some containers)."""
    found = []
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_text(index / name).strip() for name in ("level", "type", "size"))
        if level.isdecimal() and size[:-1].isdecimal():
            unit = {"K": 1 << 10, "M": 1 << 20}[size[-1]]
            found.append(Cache(int(level), kind.lower(), int(size[:-1]) * unit))
    return tuple(found)


def board(root: Path = ROOT) -> str:
    """What the device tree calls this board ("Raspberry Pi 5 Model B Rev 1.0"); empty without one."""
    return _text(root / "proc/device-tree/model").strip("\0\n ")


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        quota, period = ([*_text(folder / "cpu.max").split(), "max", "0"])[:2]
        if quota == "max":
            quota = _text(folder / "cpu.cfs_quota_us").strip() or "-1"
            period = _text(folder / "cpu.cfs_period_us").strip() or "0"
        if int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[int]:
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(folder / name).strip()
            if text.isdecimal():
                yield int(text)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of all its ancestors, versions 2 and 1."""
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = base / controllers if controllers else base
        # In a control group's namespace the path may begin with "/..", of which nothing is seen here.
        relative = Path(*(part for part in path.split("/") if part not in ("", "..")))
        # Inside a container the path may be the host's, which is not there; the mount itself then is the group.
        yield from (mount / folder for folder in (relative, *relative.parents) if (mount / folder).is_dir())


def _text(path: Path) -> str:
    return read_text(path) or ""
