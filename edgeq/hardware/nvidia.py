"""NVIDIA GPUs through NVML, where nvidia-ml-py and a driver are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeq.hardware.machine import Gpu

_DRIVER_MARKS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/nvhost-gpu"))


def detect_gpus() -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """GPUs in NVML's order, and notes on what could not be read."""
    try:
        import pynvml
    except ImportError:
        if any(mark.exists() for mark in _DRIVER_MARKS):
            return (), ("an NVIDIA driver is there, but nvidia-ml-py is not: pip install nvidia-ml-py",)
        return (), ()
    return query_nvml(pynvml)


def query_nvml(nvml: Any) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """The same from the module pynvml, or what a test puts in its place."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if any(mark.exists() for mark in _DRIVER_MARKS):
            return (), (f"NVML does not start: {error}",)
        return (), ()
    try:
        driver = nvml.nvmlSystemGetDriverVersion()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(_gpu(nvml, handle, driver) for handle in handles), ()
    except nvml.NVMLError as error:
        return (), (f"NVML does not tell about the GPUs: {error}",)
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any, driver: str) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    try:
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        memory = None  # Jetson shares the system's memory and NVML says "not supported"
    return Gpu(str(nvml.nvmlDeviceGetName(handle)), (int(major), int(minor)), memory, str(driver))
