from __future__ import annotations

import pytest

from edgeq.errors import CheckFailedError
from edgeq.pipeline import doctor as room
from edgeq.pipeline.doctor import Check, Diagnosis, doctor


@pytest.fixture(scope="module")
def here() -> dict[str, Check]:
    return {check.name: check for check in doctor().checks}


def test_what_is_installed(here: dict[str, Check]) -> None:
    assert here["onnxruntime"].status == "ok"
    assert here["CPU kernels"].status == "ok"
    assert here["provider options (explicit)"].status == "ok"
    assert here["GPU"].detail


def test_gpu_checks_that_could_not_run_fail_only_where_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "read_gpus", lambda: ((), "no driver"))
    found = doctor(gpu=True)
    assert Check("GPU run", "not run", "no driver") in found.checks
    with pytest.raises(CheckFailedError, match="GPU run: no driver"):
        found.check(gpu=True)
    found.check(gpu=False)


def test_both_packages_of_onnxruntime_are_a_fault() -> None:
    bad = Diagnosis((Check("onnxruntime", "failed", "two"),))
    with pytest.raises(CheckFailedError, match="onnxruntime: two"):
        bad.check(gpu=False)
