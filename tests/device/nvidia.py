# The functions have NVIDIA's names.
# ruff: noqa: N802
"""Imitate NVIDIA's libraries for GPUs that do not exist. They answer through the same pointers as the real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgeq_device.system.gpus import Gpu

RECORDED = (
    Gpu("Tesla T4", (7, 5), 15 << 30, "560.35.03"),
    Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 40 << 30, "560.35.03"),
    Gpu("NVIDIA L4", (8, 9), 23 << 30, "560.35.03"),
    Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30, "560.35.03"),
)


class Nvml:
    """Imitate nvidia-ml with some GPUs. `broken` names functions that return an error."""

    def __init__(self, gpus: tuple[Gpu, ...], broken: tuple[str, ...] = ()) -> None:
        self._gpus, self._broken, self.closed = gpus, broken, False

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in super().__getattribute__("_broken"):
            return lambda *arguments: 999
        return super().__getattribute__(name)

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        self.closed = True
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        buffer.value = self._gpus[0].driver.encode()
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._gpus[handle.value - 1].compute_capability
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        buffer.value = self._gpus[handle.value - 1].name.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = self._gpus[handle.value - 1].memory_bytes
        return 0


class Cuda:
    """Imitate the CUDA driver with one Orin, which has no NVML."""

    def cuInit(self, flags: Any) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device: Any, index: Any) -> int:
        device._obj.value = index.value
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> int:
        value._obj.value = {75: 8, 76: 7}[attribute.value]
        return 0

    def cuDeviceGetName(self, buffer: Any, size: Any, device: Any) -> int:
        buffer.value = b"Orin"
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:
        memory._obj.value = 8 << 30
        return 0


def loads(**libraries: Any) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        for stem, library in libraries.items():
            if stem in name:
                return library
        raise OSError(f"{name}: cannot open shared object file")

    return load
