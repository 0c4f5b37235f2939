"""What a machine is, as far as quantization cares: a value that detection fills and that tests write down."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from edgeq.display import Displayed


@dataclass(frozen=True)
class Cache:
    """One cache that the first core sees: level 1 to 4; kind "data", "instruction" or "unified"; size in bytes."""

    level: int
    kind: str
    size: int


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. `compute_capability` is (major, minor); `memory_bytes` is None where NVML does not report it."""

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int | None = None
    driver: str = ""


@dataclass(frozen=True)
class Machine(Displayed):
    """What was detected, or what a test or a target states.

    Attributes:
        architecture: "x86_64", "arm64", "riscv64", or the system's own lower-case word for another one.
        features: CPU features in the spelling of `edgeq_device.features`.
        cpu_name, vendor: for people; nothing is decided by them.
        board: what the device tree calls the board, if there is one.
        cores, threads: physical cores and hardware threads; 0 where unknown.
        usable_threads: how many of the threads this process may use, after affinity and control groups.
        caches: of the first core.
        memory_bytes: memory that this process may use: the machine's, or its control group's limit if lower.
        os: system and release.
        gpus: NVIDIA GPUs, in NVML's order.
        runtimes: version per installed runtime: "onnxruntime" or "onnxruntime-gpu", "tensorrt", "cuda", "python".
        notes: where sources disagreed and who was believed, and what could not be read.
    """

    architecture: str
    features: frozenset[str]
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
        object.__setattr__(self, "runtimes", MappingProxyType(dict(self.runtimes)))

    @property
    def gpu(self) -> Gpu | None:
        """The GPU of the highest compute capability."""
        return max(self.gpus, key=lambda gpu: gpu.compute_capability, default=None)

    @property
    def onnxruntime(self) -> str | None:
        """The version of onnxruntime, whichever of its two packages is installed."""
        return self.runtimes.get("onnxruntime") or self.runtimes.get("onnxruntime-gpu")

    def __record__(self) -> dict[str, Any]:
        """Plain JSON values; features sorted; compute capabilities as "7.5"."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["features"] = sorted(self.features)
        plain["caches"] = [dataclasses.asdict(cache) for cache in self.caches]
        plain["gpus"] = [
            dataclasses.asdict(gpu) | {"compute_capability": "{}.{}".format(*gpu.compute_capability)}
            for gpu in self.gpus
        ]
        plain["runtimes"] = dict(sorted(self.runtimes.items()))
        plain["notes"] = self.notes
        return plain
