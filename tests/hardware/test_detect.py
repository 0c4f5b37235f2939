from __future__ import annotations

from types import SimpleNamespace

import pytest
from edgeq_device.features import Reading

from edgeq.hardware import detect, nvidia, runtimes
from edgeq.hardware.detect import combine
from edgeq.hardware.machine import Cache, Gpu
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
    monkeypatch.setattr(detect, "read_system", lambda: detect.SystemInfo(caches=held, notes=("read",)))
    assert detect.detect_machine().notes[-2 if needed else -1 :] == (("asked", "read") if needed else ("read",))
    assert bool(asked) is needed


def test_the_system_is_believed_where_it_lists_features() -> None:
    reading = Reading("x86_64", frozenset({"sse4_1", "avx2"}), "/proc/cpuinfo")
    found, notes = combine(reading, frozenset({"sse4_1", "avx2", "avx512f", "osxsave"}))
    assert found == {"sse4_1", "avx2"}
    assert notes == ("py-cpuinfo reports avx512f, which /proc/cpuinfo does not list: not counted",)


def test_a_disagreement_is_said_once() -> None:
    reading = Reading("x86_64", frozenset({"avx2"}), "/proc/cpuinfo", frozenset({"avx512f"}), ("said",))
    assert combine(reading, frozenset({"avx512f"})) == (frozenset({"avx2"}), ("said",))


def test_cpuid_overrules_py_cpuinfo_on_what_it_can_tell() -> None:
    # py-cpuinfo does not look whether the system saves the registers.
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
    assert notes == ("py-cpuinfo has no answer: py-cpuinfo currently only works on X86",)


class _NvmlError(Exception):
    pass


def _nvml(**overrides: object) -> SimpleNamespace:
    def not_supported(handle: object) -> None:
        raise _NvmlError("Not Supported")

    boards = [("Tesla T4", (7, 5), 15 << 30), ("Orin (nvgpu)", (8, 7), None)]
    functions = {
        "NVMLError": _NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "560.35",
        "nvmlDeviceGetCount": lambda: len(boards),
        "nvmlDeviceGetHandleByIndex": lambda index: boards[index],
        "nvmlDeviceGetName": lambda board: board[0],
        "nvmlDeviceGetCudaComputeCapability": lambda board: board[1],
        "nvmlDeviceGetMemoryInfo": lambda board: SimpleNamespace(total=board[2]) if board[2] else not_supported(board),
    }
    return SimpleNamespace(**{**functions, **overrides})


def test_gpus_through_nvml() -> None:
    gpus, notes = nvidia.query_nvml(_nvml())
    assert gpus == (Gpu("Tesla T4", (7, 5), 15 << 30, "560.35"), Gpu("Orin (nvgpu)", (8, 7), None, "560.35"))
    assert notes == ()


def test_nvml_that_fails_is_noted_not_fatal() -> None:
    def fail() -> None:
        raise _NvmlError("GPU is lost")

    gpus, notes = nvidia.query_nvml(_nvml(nvmlDeviceGetCount=fail))
    assert gpus == ()
    assert notes == ("NVML does not tell about the GPUs: GPU is lost",)


def test_a_driver_without_its_library_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    def fail() -> None:
        raise _NvmlError("Library Not Found")

    monkeypatch.setattr(nvidia, "_DRIVER_MARKS", ())
    assert nvidia.query_nvml(_nvml(nvmlInit=fail)) == ((), ())
    monkeypatch.setattr(nvidia, "_DRIVER_MARKS", (tmp_path,))
    assert nvidia.query_nvml(_nvml(nvmlInit=fail)) == ((), ("NVML does not start: Library Not Found",))


def test_runtime_versions_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"onnxruntime-gpu": "1.31.1", "tensorrt-cu12": "10.9.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise runtimes.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(runtimes.metadata, "version", version)
    found = runtimes.detect_runtimes()
    assert {key: found[key] for key in found if key != "python"} == {
        "onnxruntime-gpu": "1.31.1",
        "tensorrt": "10.9.0",
    }
