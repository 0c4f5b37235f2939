"""NVIDIA GPUs, read from the driver's own libraries: NVML, and the CUDA driver where that is not there (Jetson)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

_NVML = ("libnvidia-ml.so.1", "nvml.dll")
_CUDA = ("libcuda.so.1", "nvcuda.dll")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NAME = 96

Load = Callable[[str], Any]


def capability_text(capability: Tuple[int, int]) -> str:
    """The compute capability (7, 5) as "7.5"."""
    return "{}.{}".format(*capability)


@dataclass(frozen=True)
class Gpu:
    """One GPU. `compute_capability` is (major, minor); `memory_bytes` is None and `driver` "" where unknown."""

    name: str
    compute_capability: Tuple[int, int]
    memory_bytes: Optional[int] = None
    driver: str = ""

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON values; the compute capability as "8.7", the memory in bytes."""
        return {
            "name": self.name,
            "compute_capability": capability_text(self.compute_capability),
            "memory_bytes": self.memory_bytes,
            "driver": self.driver,
        }


def read_gpus(load: Load = ctypes.CDLL) -> Tuple[Tuple[Gpu, ...], str]:
    """GPUs in the driver's order, and why there are none ("" where there are)."""
    problem = "this device has no NVIDIA driver"
    for names, query in ((_NVML, _query_nvml), (_CUDA, _query_cuda)):
        library = _first(load, names)
        if library is None:
            continue
        found = query(library)
        if found:
            return found, ""
        problem = "the NVIDIA driver finds no GPU"
    return (), problem


def _first(load: Load, names: Tuple[str, ...]) -> Optional[Any]:
    for name in names:
        try:
            return load(name)
        except OSError:
            continue
    return None


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _query_nvml(library: Any) -> Tuple[Gpu, ...]:
    if library.nvmlInit_v2() != 0:
        return ()
    try:
        driver = ctypes.create_string_buffer(_NAME)
        known = library.nvmlSystemGetDriverVersion(driver, ctypes.c_uint(_NAME)) == 0
        count = ctypes.c_uint(0)
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            major, minor, name, memory = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(_NAME), _Memory()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
                continue
            pair = (ctypes.byref(major), ctypes.byref(minor))
            if library.nvmlDeviceGetCudaComputeCapability(handle, *pair) != 0:
                continue
            library.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME))
            measured = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
            found.append(
                Gpu(
                    name.value.decode("utf-8", "replace"),
                    (major.value, minor.value),
                    memory.total if measured else None,
                    driver.value.decode("utf-8", "replace") if known else "",
                )
            )
        return tuple(found)
    finally:
        library.nvmlShutdown()


def _query_cuda(library: Any) -> Tuple[Gpu, ...]:
    count = ctypes.c_int(0)
    if library.cuInit(ctypes.c_uint(0)) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for index in range(count.value):
        device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(_NAME), ctypes.c_size_t()
        if library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)) != 0:
            continue
        version = []
        for attribute in (_MAJOR, _MINOR):
            value = ctypes.c_int()
            if library.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), device) == 0:
                version.append(value.value)
        library.cuDeviceGetName(name, ctypes.c_int(_NAME), device)
        measured = library.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0
        if len(version) == 2:
            found.append(
                Gpu(
                    name.value.decode("utf-8", "replace"),
                    (version[0], version[1]),
                    memory.value if measured else None,
                )
            )
    return tuple(found)
