"""Test the detection of GPUs with libraries that answer as the real ones do."""

from __future__ import annotations

import ctypes

import pytest
from edgeq_device.system.gpus import Gpu, read_gpus

from tests.device.nvidia import RECORDED, Cuda, Nvml, loads


def test_every_gpu_that_nvml_lists() -> None:
    nvml = Nvml(RECORDED)
    assert read_gpus(loads(nvidia=nvml)) == (RECORDED, "")
    assert nvml.closed


def test_memory_that_nvml_does_not_tell() -> None:
    gpus, _ = read_gpus(loads(nvidia=Nvml(RECORDED[:1], ("nvmlDeviceGetMemoryInfo", "nvmlSystemGetDriverVersion"))))
    assert gpus == (Gpu("Tesla T4", (7, 5)),)


@pytest.mark.parametrize("broken", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"])
def test_the_cuda_driver_is_queried_where_nvml_has_no_answer(broken: str) -> None:
    libraries = loads(nvidia=Nvml(RECORDED, (broken,)), cuda=Cuda())
    assert read_gpus(libraries) == ((Gpu("Orin", (8, 7), 8 << 30),), "")


def test_no_driver_and_no_gpu_are_distinguished() -> None:
    assert read_gpus(loads()) == ((), "this device has no NVIDIA driver")
    assert read_gpus(loads(nvidia=Nvml(RECORDED, ("nvmlInit_v2",)))) == ((), "the NVIDIA driver finds no GPU")


def test_the_real_loader_on_this_machine() -> None:
    gpus, problem = read_gpus()
    assert bool(gpus) != bool(problem)
    assert all(isinstance(gpu, Gpu) for gpu in gpus)
    assert ctypes.sizeof(ctypes.c_ulonglong) == 8
