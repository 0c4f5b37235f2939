"""Test a target whose engine is simulated here: its bundle has the compiled file, and the simulator verifies it."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgeq_device.bundle.package import open_bundle
from edgeq_device.bundle.select import judge
from edgeq_device.engines.device import read_device

import edgeq
from edgeq import demo
from edgeq.backends.base import SIMULATORS
from edgeq.data.open_source import Data
from edgeq.emulate.check import VerifyRequest, verify_on
from tests.backends.qnn.test_qnn import simulator

TARGET, OLDER = "hexagon-v75", "hexagon-v68"


@simulator
@pytest.mark.slow
def test_a_bundle_holds_what_was_compiled_and_the_cpu_runs_it_here(tmp_path: Path) -> None:
    data = Data(demo.CALIBRATION, count=4)
    packaged = edgeq.package(
        demo.MODEL,
        data,
        tmp_path / "b",
        targets=[TARGET, OLDER],
        fix=demo_sizes(),
        selftest=1,
        emulate=False,
        timed=False,
    )
    proof = packaged.variants[TARGET].proof
    assert (proof.engine, proof.speed) == ("qnn", None)
    assert proof.samples == 4
    with open_bundle(tmp_path / "b") as bundle:
        variants = {variant.name: variant for variant in bundle.components["model"]}
        ranks = {name: variant.rank for name, variant in variants.items()}
        assert ranks[f"{TARGET}-compiled"] > ranks[TARGET] > ranks[f"{TARGET}-cpu"]
        assert variants[f"{TARGET}-compiled"].info["compiled_by"].startswith("onnxruntime-qnn ")
        compiled = {target: variants[f"{target}-compiled"].model for target in (TARGET, OLDER)}
        assert len({path.read_bytes() for path in compiled.values() if path is not None}) == 2, "each for its own"
        here = {name: judge(variant, read_device()) for name, variant in variants.items()}
    assert {name for name, verdict in here.items() if verdict.fits} == {f"{TARGET}-cpu", f"{OLDER}-cpu"}
    assert any("is a simulator" in reason for reason in here[TARGET].reasons)
    found = verify_on(VerifyRequest(tmp_path / "b", (TARGET,)), simulators=SIMULATORS)
    (check,) = found.checks
    assert (check.variant, check.status, check.where) == (f"{TARGET}-compiled", "passed", "modelled")


def demo_sizes() -> dict[str, int]:
    from edgeq.model.load import read_model
    from edgeq.model.sizes import free_sizes

    return dict.fromkeys(free_sizes(read_model(demo.MODEL)), 1)


def test_without_the_package_verify_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeq.errors import RuntimeUnavailableError
    from edgeq.hardware.target import resolve
    from edgeq.run.session import SessionSettings

    monkeypatch.setattr("edgeq_device.engines.catalog.read_installed_version", lambda engine: "")
    simulator = SIMULATORS["qnn"](resolve(TARGET))
    with pytest.raises(RuntimeUnavailableError, match=r"onnxruntime-qnn, not installed here.*pip"), simulator as opened:
        opened(demo.MODEL, SessionSettings())
