"""Test a plug-in's kernels for other CPUs: why they cannot run here, and what is proven of those that run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edgeq.emulate.check import CheckedModel, check_trial, find_route
from edgeq.emulate.probe import EXACT, SATURATED
from edgeq.emulate.routes import EMULATED, NATIVE, NOT_RUN, choose_route
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.hardware.target import resolve
from edgeq.run.engines import Engine, IsaCap, IsaLevel, load_engines
from edgeq.run.session import SessionSettings
from edgeq.scheme import Scheme
from tests import fake_engine
from tests.backends.build import bench, residual
from tests.plugins import needs_plugin

HERE_SATURATES = match_profile(detect_machine(), load_profiles()).profile.saturates(Scheme())
HERE = SATURATED if HERE_SATURATES else EXACT
AVX2 = ("avx2", "fma")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
OLD, NEW = Machine("x86_64", frozenset({"sse4_1"})), Machine("x86_64", frozenset({"sse4_1", *AVX2, *AVX512}))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Install a plug-in that can be restricted to AVX2. It computes with this machine's kernels."""
    (tmp_path / "plugin").mkdir()
    engine = fake_engine.install(tmp_path / "plugin", monkeypatch)
    capped = dataclasses.replace(engine, cap=IsaCap("FAKE_ISA", (IsaLevel("AVX2", AVX2),)))
    return _saturating(capped) if HERE_SATURATES else capped


def _saturating(engine: Engine) -> Engine:
    """Return the engine, described as one that saturates without VNNI."""
    return dataclasses.replace(
        engine,
        platforms=("linux x86_64", "linux arm64", "darwin arm64", "windows x86_64"),
        int8=dataclasses.replace(engine.int8, saturates_without=("avx512_vnni",)),
    )


def test_without_a_plugin_nothing_changes() -> None:
    target = resolve("haswell", OLD)
    expected = choose_route(target, OLD)
    for engine in (None, load_engines()["onnxruntime"]):
        found = find_route(target, OLD, engine)
        assert (found.where, found.how, found.reason) == (expected.where, expected.how, expected.reason)


def test_why_it_is_not_run(fake: Engine) -> None:
    def reason(target: str, machine: Machine, engine: Engine = fake) -> str:
        found = find_route(resolve(target, machine), machine, engine)
        assert (found.where, found.start) == (NOT_RUN, None)
        return found.reason

    assert reason("raspberry-pi-5", NEW) == "fake runs its kernels for arm64 only on arm64"
    assert reason("haswell", OLD) == "this CPU lacks avx2, fma, which fake's kernels need"
    assert reason("generic-x86-64", NEW) == "fake cannot be limited to the instructions of generic-x86-64"
    absent = dataclasses.replace(fake, packages=("edgeq-no-such-package",))
    assert "not installed here. Install it:" in reason("haswell", NEW, absent)


def test_a_capped_process_runs_that_cpus_kernels(fake: Engine, tmp_path: Path) -> None:
    net = bench(tmp_path, residual())
    artifact = net.build()
    settings = SessionSettings(engine=fake, intra_op_threads=1)
    trial = CheckedModel(artifact.model, settings, samples=net.samples, float_model=net.prepared.path, name="v")
    found = check_trial(trial, resolve("haswell", NEW), NEW)
    assert (found.status, found.where, found.how) == ("passed", EMULATED, "fake with FAKE_ISA=AVX2"), found.reason
    assert found.kernels is not None
    assert found.kernels.pairs == HERE
    assert found.agreement is not None
    assert found.host_agreement is not None
    assert found.agreement.sqnr_db == found.host_agreement.sqnr_db


def test_other_kernels_than_the_targets_prove_nothing(fake: Engine, tmp_path: Path) -> None:
    exact = dataclasses.replace(fake, int8=dataclasses.replace(fake.int8, saturates_without=()))
    other = exact if HERE_SATURATES else _saturating(fake)
    trial = CheckedModel(bench(tmp_path, residual()).build().model, SessionSettings(engine=other))
    found = check_trial(trial, resolve("haswell", NEW), NEW)
    assert found.status == "not run"
    assert f"its u8 x s8 sums are {HERE}, not {EXACT if HERE_SATURATES else SATURATED}" in found.reason


def test_this_machines_own_kernels(fake: Engine) -> None:
    machine = detect_machine()
    found = find_route(resolve("auto", machine), machine, fake)
    assert (found.where, found.how) == (NATIVE, "fake, this machine")


@needs_plugin("openvino")
def test_the_installed_engine_saturates_under_its_cap_and_not_here(tmp_path: Path) -> None:
    machine, engine = detect_machine(), load_engines()["openvino"]
    if not {*AVX2, "avx512_vnni"} <= machine.features:
        pytest.skip("this CPU has no AVX-512 VNNI")
    net = bench(tmp_path, residual())
    losses = {}
    for name, scheme in {"full": {}, "fitted": {"fit_pairs": True}}.items():
        model = net.build(f"{name}.onnx", **scheme).model
        trial = CheckedModel(model, SessionSettings(engine=engine), samples=net.samples, float_model=net.prepared.path)
        found = check_trial(trial, resolve("haswell", machine), machine)
        assert found.kernels is not None, found.reason
        assert found.kernels.pairs == "saturated"
        assert found.agreement is not None
        assert found.host_agreement is not None
        losses[name] = found.host_agreement.sqnr_db - found.agreement.sqnr_db
    assert losses["full"] > 1
    assert abs(losses["fitted"]) < 0.1
