"""Detect this machine as a `Machine`, from the operating system and CPUID. If these sources do not suffice, edgeq also
uses py-cpuinfo.

py-cpuinfo spells some flags twice, knows only CPUID leaf 7/0 (no AVX-VNNI, no AMX), and merges CPUID's answers with the
list in /proc/cpuinfo. So edgeq uses py-cpuinfo's features only if the system lists none, as in a container that hides
them. If the system has a list, features that are missing from it are not used, because a hypervisor or a boot option
may have hidden them on purpose. Disagreements become notes. py-cpuinfo keeps a core busy for a second to measure the
clock, so edgeq does not run it if it would add nothing.

The module also finds how much of the machine this process may use: threads and memory within its affinity and control
groups. It also finds the caches.

Functions that read system files have the root of the file system as an argument, so that tests can pass another root.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgeq_device.engines.catalog import read_installed_versions
from edgeq_device.system.features import (
    FEATURES,
    ROOT,
    Evidence,
    Reading,
    gather,
    interpret,
    normalise,
    parse_identity,
    read_allowed_cores,
    read_text,
)
from edgeq_device.system.gpus import Gpu, Load, read_gpus

from edgeq.errors import HardwareError
from edgeq.util.display import Displayed
from edgeq.util.record_files import toml_table


@dataclass(frozen=True)
class Cache:
    """Describe one cache of the first core.

    Attributes:
        level: 1 to 4.
        kind: "data", "instruction" or "unified".
        size: size in bytes.
    """

    level: int
    kind: str
    size: int


@dataclass(frozen=True)
class Machine(Displayed):
    """Describe a machine that was detected, or that a test or a target defines.

    Attributes:
        architecture: "x86_64", "arm64" or "riscv64"; for others, the system's own name in lower case.
        features: CPU features in the spelling of `edgeq_device.system.features`.
        cpu_name: the CPU's name, only for display.
        vendor: the CPU's maker. Its only use is to find engines that do not support the CPU.
        board: the board's name in the device tree; "" if it has none.
        cores, threads: physical cores and hardware threads; 0 if unknown.
        usable_threads: number of threads that this process may use, after affinity and control groups.
        caches: caches of the first core.
        memory_bytes: memory that this process may use: the machine's, or its control group's limit if that is lower.
        os: system and release.
        gpus: NVIDIA GPUs, in NVML's order.
        runtimes: versions of the installed runtimes: "onnxruntime" or "onnxruntime-gpu", "tensorrt", "cuda", "python".
        notes: disagreements between sources, each with the source that was used; and values that could not be read.
    """

    architecture: str = ""
    features: frozenset[str] = frozenset()
    cpu_name: str = ""
    vendor: str = ""
    board: str = ""
    cores: int = 0
    threads: int = 0
    usable_threads: int = 0
    caches: tuple[Cache, ...] = ()
    memory_bytes: int = 0
    os: str = ""
    gpus: tuple[Gpu, ...] = ()
    runtimes: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "runtimes", MappingProxyType(dict(sorted(self.runtimes.items()))))

    @property
    def gpu(self) -> Gpu | None:
        """Return the GPU with the highest compute capability; None without a GPU."""
        return max(self.gpus, key=lambda gpu: gpu.compute_capability, default=None)

    @property
    def onnxruntime(self) -> str | None:
        """Return the version of onnxruntime, whichever of its two packages is installed; None if neither is."""
        return self.runtimes.get("onnxruntime") or self.runtimes.get("onnxruntime-gpu")


_UNLIMITED = 1 << 60  # control groups v1 write "no limit" as a page-aligned number just under 2**63


def count_threads(root: Path = ROOT, affinity: int | None = None) -> int:
    """Return the number of hardware threads that this process may use, at least 1.

    Args:
        affinity: number of threads that the scheduler allows; None means the number for this process. The CPU quota of
            the control groups may lower the result further.
    """
    quotas = [math.ceil(quota) for quota in _read_cpu_quotas(root)]
    return max(1, min([len(read_allowed_cores()) if affinity is None else affinity, *quotas]))


def read_memory(root: Path = ROOT) -> int:
    """Return the total memory of a Linux system, or the lowest control-group limit if that is less; 0 if unknown."""
    total = 0
    for line in _read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limits = [limit for limit in _read_memory_limits(root) if limit < _UNLIMITED]
    return min([total, *limits]) if total else 0


def count_cores(cpuinfo: str) -> tuple[int, int]:
    """Return the numbers of physical cores and hardware threads from the text of /proc/cpuinfo. If the text has no
    topology, the number of cores is 0.
    """
    blocks = [parse_identity(block) for block in cpuinfo.split("\n\n")]
    processors = [block for block in blocks if "processor" in block]
    cores = {(block.get("physical id", "0"), block["core id"]) for block in processors if "core id" in block}
    return len(cores), len(processors)


def read_caches(root: Path = ROOT) -> tuple[Cache, ...]:
    """Return the caches of the first core, from sysfs. The result is empty if sysfs lists none (macOS, Windows, some
    containers).
    """
    core_caches = []
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read_text(index / name).strip() for name in ("level", "type", "size"))
        if level.isdecimal() and size[:-1].isdecimal():
            unit = {"K": 1 << 10, "M": 1 << 20}[size[-1]]
            core_caches.append(Cache(int(level), kind.lower(), int(size[:-1]) * unit))
    return tuple(core_caches)


def read_board(root: Path = ROOT) -> str:
    """Return the board's name in the device tree ("Raspberry Pi 5 Model B Rev 1.0"); empty if the tree has none."""
    return _read_text(root / "proc/device-tree/model").strip("\0\n ")


def _read_cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _find_groups(root, "cpu"):
        quota, period = ([*_read_text(folder / "cpu.max").split(), "max", "0"])[:2]
        if quota == "max":
            quota = _read_text(folder / "cpu.cfs_quota_us").strip() or "-1"
            period = _read_text(folder / "cpu.cfs_period_us").strip() or "0"
        if int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)


def _read_memory_limits(root: Path) -> Iterator[int]:
    for folder in _find_groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read_text(folder / name).strip()
            if text.isdecimal():
                yield int(text)


def _find_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all its ancestors, for versions 2 and 1."""
    base = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = base / controllers if controllers else base
        # Inside a control group's namespace, the path may begin with "/..". The part above the namespace cannot be seen
        # from inside.
        relative = Path(*(part for part in path.split("/") if part not in ("", "..")))
        # Inside a container, the path may be the host's, which does not exist in the container. The group is then the
        # mount point itself.
        yield from (mount / folder for folder in (relative, *relative.parents) if (mount / folder).is_dir())


def _read_text(path: Path) -> str:
    return read_text(path) or ""


_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime",),
    "onnxruntime-gpu": ("onnxruntime-gpu",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu11"),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11"),
}


def detect_runtimes() -> dict[str, str]:
    """Return the version of each installed runtime, and Python's own."""
    return find_runtimes(read_installed_versions(PACKAGES), platform.python_version())


PACKAGES = tuple(package for packages in _DISTRIBUTIONS.values() for package in packages)
"""Packages whose versions `find_runtimes` reads."""


def find_runtimes(versions: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the version of each runtime among the packages in `versions`, and Python's own."""
    runtimes = {
        name: next(versions[package] for package in packages if package in versions)
        for name, packages in _DISTRIBUTIONS.items()
        if any(package in versions for package in packages)
    }
    return {**runtimes, "python": python}


_DRIVER_MARKS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/nvhost-gpu"))


def detect_machine() -> Machine:
    """Detect this machine. This takes milliseconds, or 1.3 seconds if py-cpuinfo is needed."""
    evidence, info = gather(), read_system()
    # If this is true, py-cpuinfo would add nothing: it reads the same file and less of CPUID, and lists no other
    # caches.
    complete = evidence.cpuid is not None and interpret(evidence).source == "/proc/cpuinfo" and bool(info.caches)
    reported, notes = ({}, ()) if complete else query_py_cpuinfo()
    return describe(evidence, reported, replace(info, notes=(*notes, *info.notes)))


def describe(evidence: Evidence, reported: Mapping[str, Any], info: Machine | None = None) -> Machine:
    """Return the machine that results from the evidence, py-cpuinfo's report and the rest of the system.

    The function reads nothing from the machine that it runs on.

    Args:
        info: everything but the CPU, as `read_system` returns it; None for a recording, which has no such data.
    """
    info = info or Machine()
    reading = interpret(evidence)
    features, notes = combine(reading, normalise(reported.get("flags", ())))
    identity = parse_identity(evidence.cpuinfo)
    sysctl = parse_identity(evidence.sysctl)
    cores, threads = count_cores(evidence.cpuinfo)
    vendor, name = _name_arm_core(identity)
    return replace(
        info,
        architecture=reading.architecture,
        features=features,
        cpu_name=_choose_text(
            reported.get("brand_raw"), identity.get("model name"), sysctl.get("machdep.cpu.brand_string")
        )
        or name,
        vendor=_choose_text(reported.get("vendor_id_raw"), identity.get("vendor_id"), sysctl.get("machdep.cpu.vendor"))
        or vendor,
        cores=cores or int(sysctl.get("hw.physicalcpu", 0)),
        threads=threads or int(sysctl.get("hw.logicalcpu", 0)) or int(reported.get("count", 0)),
        caches=info.caches or _parse_caches(reported, sysctl),
        memory_bytes=info.memory_bytes or int(sysctl.get("hw.memsize", 0)),
        notes=(*notes, *info.notes),
    )


def combine(reading: Reading, reported: frozenset[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the CPU features to use, and notes on disagreements between the system's list and py-cpuinfo's report."""
    if not reading.source:
        if not reported:
            return frozenset(), ("no source lists this CPU's features: only the profile for every machine fits",)
        return reported, ("the system lists no CPU features: py-cpuinfo's own CPUID answers are used",)
    notes = reading.notes
    if reading.source == "CPUID":
        notes = (*notes, "the system lists no or few CPU features: CPUID's answers are used")
        return reading.features | reported - FEATURES, notes
    # Compare only features that affect a decision: the two sources differ in dozens of other names.
    hidden = (reported & FEATURES) - reading.features - reading.doubted
    if hidden:
        names = ", ".join(sorted(hidden))
        notes = (*notes, f"py-cpuinfo reports {names}, which {reading.source} does not list: not counted")
    return reading.features, notes


@cache
def query_py_cpuinfo() -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return py-cpuinfo's report, which is read once per process. On an unsupported CPU it is empty, with a note."""
    import cpuinfo

    try:
        return MappingProxyType(dict(cpuinfo.get_cpu_info())), ()
    except Exception as error:  # py-cpuinfo raises a bare Exception for unknown architectures
        return {}, (f"py-cpuinfo reports nothing: {error}",)


def read_system() -> Machine:
    """Read everything about this machine but its CPU."""
    gpus, gpu_notes = detect_gpus()
    return Machine(
        board=read_board(),
        usable_threads=count_threads(),
        caches=read_caches(),
        memory_bytes=read_memory() or _read_windows_memory(),
        os=f"{platform.system()} {platform.release()}",
        gpus=gpus,
        runtimes=detect_runtimes(),
        notes=gpu_notes,
    )


def detect_gpus(load: Load = ctypes.CDLL) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the NVIDIA GPUs in the driver's order. If a driver is present but lists none, add a note."""
    gpus, problem = read_gpus(load)
    # Most machines have no NVIDIA driver, and then a missing library is no news.
    return gpus, (problem,) if not gpus and any(mark.exists() for mark in _DRIVER_MARKS) else ()


def _choose_text(*candidates: object) -> str:
    return next((str(candidate) for candidate in candidates if candidate), "")


def _name_arm_core(identity: Mapping[str, str]) -> tuple[str, str]:
    """Return the vendor and core name for "CPU implementer" and "CPU part". On ARM, /proc/cpuinfo has these numbers
    instead of names.
    """
    implementer, part = identity.get("CPU implementer", ""), identity.get("CPU part", "")
    parts = load_arm_parts().get(implementer, {})
    return parts.get("vendor", ""), parts.get(part, f"part {part}" if part else "")


@cache
def load_arm_parts() -> dict[str, dict[str, str]]:
    """Return, for each implementer, its "vendor" and the names of its cores by part. The keys are spelled as in
    /proc/cpuinfo.
    """
    return toml_table(Path(__file__).parent / "arm_parts.toml", HardwareError, "Install edgeq again")


def _parse_caches(reported: Mapping[str, Any], sysctl: Mapping[str, str]) -> tuple[Cache, ...]:
    core_caches = []
    for level, kind, key, apple in (
        (1, "data", "l1_data_cache_size", "hw.l1dcachesize"),
        (1, "instruction", "l1_instruction_cache_size", "hw.l1icachesize"),
        (2, "unified", "l2_cache_size", "hw.l2cachesize"),
        (3, "unified", "l3_cache_size", "hw.l3cachesize"),
    ):
        size = sysctl.get(apple) or reported.get(key) or 0
        if str(size).isdecimal() and int(size):
            core_caches.append(Cache(level, kind, int(size)))
    return tuple(core_caches)


def _read_windows_memory() -> int:
    """Return the total memory in bytes on Windows; 0 on other systems."""
    if platform.system() != "Windows":
        return 0
    installed = ctypes.c_ulonglong(0)
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
    kernel.GetPhysicallyInstalledSystemMemory(ctypes.byref(installed))
    return installed.value * 1024
