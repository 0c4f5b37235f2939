from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from edgeq_device.engines.catalog import read_platform
from edgeq_device.system.gpus import Gpu

from edgeq.errors import CheckFailedError
from edgeq.hardware.detect import detect_machine
from edgeq.jobs import doctor as room
from edgeq.jobs.doctor import DoctorCheck, EngineDiagnosis, doctor
from edgeq.run.engines import load_engines
from edgeq.util.display import SILENT
from tests import fake_engine


@pytest.fixture(scope="module")
def here() -> dict[str, DoctorCheck]:
    return {check.name: check for check in doctor().checks}


def test_reports_installed_runtimes(here: dict[str, DoctorCheck]) -> None:
    assert here["onnxruntime"].status == "ok"
    assert here["CPU kernels"].status == "ok"
    assert here["provider options (explicit)"].status == "ok"
    assert here["GPU"].detail


def test_an_installed_simulator_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, known = detect_machine(), load_engines()
    monkeypatch.setattr("edgeq.hardware.engines.read_installed_version", lambda engine: "1.40.0")
    for simulated_on, status in (((read_platform(),), "ok"), ((), "failed")):
        engine = replace(known["qnn"], simulated_on=simulated_on, module="no_such_module")
        monkeypatch.setattr(room, "load_engines", {**known, "qnn": engine}.copy)
        checks = {check.name: check for check in room._engines(machine, SILENT)}
        assert checks["engine qnn"].status == status


def test_a_gpu_that_an_installed_engine_does_not_take_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(detect_machine(), gpus=(Gpu("H100", (9, 0)),))
    engine = replace(load_engines()["nv-tensorrt-rtx"], module="no_such_module")
    monkeypatch.setattr("edgeq.hardware.engines.read_installed_version", lambda engine: "1.40.0")
    monkeypatch.setattr(room, "load_engines", {"onnxruntime": load_engines()["onnxruntime"], engine.name: engine}.copy)
    (check,) = room._engines(machine, SILENT)
    assert check.status == "absent"
    assert check.detail.endswith("this machine has H100: 9.0")


def test_an_installed_engine_that_does_not_take_this_cpu_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(detect_machine(), vendor="AuthenticAMD")
    engine = replace(load_engines()["openvino"], direct=None)
    monkeypatch.setattr("edgeq.hardware.engines.read_installed_version", lambda engine: "1.8.1")
    monkeypatch.setattr(room, "load_engines", {"onnxruntime": load_engines()["onnxruntime"], engine.name: engine}.copy)
    (check,) = room._engines(machine, SILENT)
    assert check.status == "absent"
    assert check.detail.endswith("this one is AuthenticAMD")


@pytest.mark.parametrize(
    ("behaviour", "detail"),
    [
        ("fails at import", "edgeq-fake-direct 1.2.3 cannot be imported: libfake.so"),
        ("crashes at compile", "signal SIGSEGV"),
        ("answers wrong", "wrong"),
    ],
)
def test_a_package_that_is_broken_fails_with_one_line(
    behaviour: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine.install_direct(tmp_path, monkeypatch, behaviour)
    monkeypatch.setattr(room, "load_engines", {"onnxruntime": load_engines()["onnxruntime"], engine.name: engine}.copy)
    (check,) = room._engines(detect_machine(), SILENT)
    assert check.status == "failed"
    assert detail in check.detail
    assert "\n" not in check.detail


def test_gpu_checks_that_could_not_run_fail_only_where_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "read_gpus", lambda: ((), "no driver"))
    not_run = DoctorCheck("GPU run", "not run", "no driver")
    assert not_run in doctor(gpu=True).checks
    with pytest.raises(CheckFailedError, match="GPU run: no driver"):
        EngineDiagnosis((not_run,)).check(gpu=True)
    EngineDiagnosis((not_run,)).check(gpu=False)


def test_both_packages_of_onnxruntime_are_a_fault() -> None:
    bad = EngineDiagnosis((DoctorCheck("onnxruntime", "failed", "two"),))
    with pytest.raises(CheckFailedError, match="onnxruntime: two"):
        bad.check(gpu=False)
