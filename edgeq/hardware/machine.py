"""What a machine is, as far as quantization cares: a value that detection fills and that tests write down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from edgeq_device.cuda import Gpu

from edgeq.util.display import Displayed


@dataclass(frozen=True)
class Cache:
    """One cache that the first core sees: level 1 to 4; kind "data", "instruction" or "unified"; size in bytes."""

    level: int
    kind: str
    size: int


@dataclass(frozen=True)
class Machine(Displayed):
    """What was detected, or what a test or a target states.

    Attributes:
        architecture: "x86_64", "arm64", "riscv64", or the system's own lower-case word for another one.
        features: CPU features in the spelling of `edgeq_device.features`.
        cpu_name: for people; nothing is decided by it.
        vendor: the CPU's maker, by which only engines are left out that do not take its CPUs.
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
        object.__setattr__(self, "runtimes", MappingProxyType(dict(sorted(self.runtimes.items()))))

    @property
    def gpu(self) -> Gpu | None:
        """The GPU of the highest compute capability."""
        return max(self.gpus, key=lambda gpu: gpu.compute_capability, default=None)

    @property
    def onnxruntime(self) -> str | None:
        """The version of onnxruntime, whichever of its two packages is installed."""
        return self.runtimes.get("onnxruntime") or self.runtimes.get("onnxruntime-gpu")
