from __future__ import annotations

from importlib import metadata

import pytest
from edgeq_device.system.features import Reading
from edgeq_device.system.gpus import Gpu

from edgeq.hardware import detect
from edgeq.hardware import detect as runtimes
from edgeq.hardware.detect import Cache, combine
from tests.device.nvidia import RECORDED, Nvml, loads
from tests.hardware.recorded import RECORDS, evidence_of


def test_this_machine() -> None:
    machine = detect.detect_machine()
    assert machine.architecture
    assert machine.usable_threads >= 1
    assert machine.runtimes["python"]
    assert machine.os


@pytest.mark.parametrize(
    ("name", "caches", "needed"),
    [
        ("sierra-forest", True, False),
        ("sierra-forest", False, True),
        ("haswell", True, True),  # CPUID was not read
        ("windows-alder-lake", True, True),
        ("cortex-a76", True, True),
    ],
)
def test_py_cpuinfo_is_run_only_where_something_is_open(
    name: str, caches: bool, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(detect, "gather", lambda: evidence_of(RECORDS[name]))
    monkeypatch.setattr(detect, "query_py_cpuinfo", lambda: asked.append(name) or ({}, ("asked",)))
    held = (Cache(1, "data", 1 << 15),) * caches
    monkeypatch.setattr(detect, "read_system", lambda: detect.Machine(caches=held, notes=("read",)))
    assert detect.detect_machine().notes[-2 if needed else -1 :] == (("asked", "read") if needed else ("read",))
    assert bool(asked) is needed


def test_the_system_is_believed_where_it_lists_features() -> None:
    reading = Reading("x86_64", frozenset({"sse4_1", "avx2"}), "/proc/cpuinfo")
    found, notes = combine(reading, frozenset({"sse4_1", "avx2", "avx512f", "osxsave"}))
    assert found == {"sse4_1", "avx2"}
    assert notes == ("py-cpuinfo reports avx512f, which /proc/cpuinfo does not list: not counted",)


def test_a_disagreement_is_reported_once() -> None:
    reading = Reading("x86_64", frozenset({"avx2"}), "/proc/cpuinfo", frozenset({"avx512f"}), ("said",))
    assert combine(reading, frozenset({"avx512f"})) == (frozenset({"avx2"}), ("said",))


def test_cpuid_overrules_py_cpuinfo_on_what_it_can_tell() -> None:
    # py-cpuinfo does not check whether the system saves the registers.
    found, notes = combine(Reading("x86_64", frozenset({"avx2"}), "CPUID"), frozenset({"avx512f", "sha"}))
    assert found == {"avx2", "sha"}
    assert len(notes) == 1


def test_an_architecture_that_py_cpuinfo_refuses_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    import cpuinfo

    def refuse() -> None:
        raise Exception("py-cpuinfo currently only works on X86")

    monkeypatch.setattr(cpuinfo, "get_cpu_info", refuse)
    reported, notes = detect.query_py_cpuinfo.__wrapped__()
    assert reported == {}
    assert notes == ("py-cpuinfo reports nothing: py-cpuinfo currently only works on X86",)


def test_gpus_as_the_driver_lists_them() -> None:
    nvml = Nvml(RECORDED[:2], ("nvmlDeviceGetMemoryInfo",))
    gpus = tuple(Gpu(gpu.name, gpu.compute_capability, None, gpu.driver) for gpu in RECORDED[:2])
    assert detect.detect_gpus(loads(nvidia=nvml)) == (gpus, ())


def test_a_driver_that_shows_no_gpu_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(detect, "_DRIVER_MARKS", ())
    assert detect.detect_gpus(loads()) == ((), ())
    monkeypatch.setattr(detect, "_DRIVER_MARKS", (tmp_path,))
    assert detect.detect_gpus(loads()) == ((), ("this device has no NVIDIA driver",))
    lost = Nvml(RECORDED, ("nvmlDeviceGetCount_v2",))
    assert detect.detect_gpus(loads(nvidia=lost)) == ((), ("the NVIDIA driver finds no GPU",))


def test_runtime_versions_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"onnxruntime-gpu": "1.31.1", "tensorrt-cu12": "10.9.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    found = runtimes.detect_runtimes()
    assert {key: found[key] for key in found if key != "python"} == {
        "onnxruntime-gpu": "1.31.1",
        "tensorrt": "10.9.0",
    }
