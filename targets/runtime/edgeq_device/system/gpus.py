"""Find the NVIDIA GPUs of this machine through the driver's own libraries, without CUDA or numpy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

_NVML = ("libnvidia-ml.so.1", "nvml.dll")
_CUDA = ("libcuda.so.1", "nvcuda.dll")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
# Bytes of the largest name; NVML's own buffers are not larger.
_NAME = 96
Load = Callable[[str], Any]


def format_capability(capability: Tuple[int, int]) -> str:
    """Return the compute capability (7, 5) as "7.5"."""
    return "{}.{}".format(*capability)


@dataclass(frozen=True)
class Gpu:
    """Describe one GPU. `compute_capability` is (major, minor). An unknown `memory_bytes` is None, and an unknown
    `driver` is "".
    """

    name: str
    compute_capability: Tuple[int, int]
    memory_bytes: Optional[int] = None
    driver: str = ""

    def to_dict(self) -> Dict[str, Any]:
        """Return plain JSON values. The compute capability is a text such as "8.7", and the memory is in bytes."""
        return {
            "name": self.name,
            "compute_capability": format_capability(self.compute_capability),
            "memory_bytes": self.memory_bytes,
            "driver": self.driver,
        }


def read_gpus(load: Load = ctypes.CDLL) -> Tuple[Tuple[Gpu, ...], str]:
    """Return the GPUs in the driver's order, and the reason if there are none ("" if there are some)."""
    problem = "this device has no NVIDIA driver"
    # NVML needs no context on the GPU. Boards without NVML have CUDA's driver.
    for names, query in ((_NVML, _query_nvml), (_CUDA, _query_cuda)):
        library = _load_any(load, names)
        if library is None:
            continue
        gpus = query(library)
        if gpus:
            return gpus, ""
        problem = "the NVIDIA driver finds no GPU"
    return (), problem


def _load_any(load: Load, names: Tuple[str, ...]) -> Optional[Any]:
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
        has_driver = library.nvmlSystemGetDriverVersion(driver, ctypes.c_uint(_NAME)) == 0
        count = ctypes.c_uint(0)
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        gpus = []
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
            gpus.append(
                Gpu(
                    name.value.decode("utf-8", "replace"),
                    (major.value, minor.value),
                    memory.total if measured else None,
                    driver.value.decode("utf-8", "replace") if has_driver else "",
                )
            )
        return tuple(gpus)
    finally:
        library.nvmlShutdown()


def _query_cuda(library: Any) -> Tuple[Gpu, ...]:
    count = ctypes.c_int(0)
    if library.cuInit(ctypes.c_uint(0)) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    gpus = []
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
            gpus.append(
                Gpu(
                    name.value.decode("utf-8", "replace"),
                    (version[0], version[1]),
                    memory.value if measured else None,
                )
            )
    return tuple(gpus)
