from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from edgeq_device.system.features import FEATURES

from edgeq.emulate import routes
from edgeq.emulate.routes import EMULATED, MODELLED, NATIVE, NOT_RUN, Open, Running, choose_route
from edgeq.errors import CheckFailedError, HardwareError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.profile import load_profiles
from edgeq.hardware.target import Target, resolve
from edgeq.run.session import open_session

AVX2 = "sse4_1 avx avx2 fma"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"
SERVER = Machine("x86_64", frozenset(f"{AVX512} avx512_vnni".split()))
LAPTOP = Machine("x86_64", frozenset(AVX2.split()))


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    """Imitate a machine with a compiler but without qemu."""
    monkeypatch.setattr(routes, "mask_problem", lambda: "")
    monkeypatch.setenv("PATH", "")


@pytest.mark.parametrize(
    ("target", "machine", "where", "how"),
    [
        ("cascade-lake", SERVER, NATIVE, "this machine"),
        ("haswell", LAPTOP, NATIVE, "this machine"),
        ("haswell", SERVER, EMULATED, "this CPU with avx512f masked"),
        ("x86-64-avx512", SERVER, EMULATED, "this CPU with avx512_vnni masked"),
        ("generic-x86-64", SERVER, EMULATED, "this CPU with avx512_vnni masked"),
        ("generic-x86-64", LAPTOP, NATIVE, "this machine"),
    ],
)
def test_the_best_way_is_taken(target: str, machine: Machine, where: str, how: str) -> None:
    route = choose_route(resolve(target, machine), machine)
    assert (route.where, route.how, route.reason) == (where, how, "")
    assert route.native_speed
    assert route.start is not None


@pytest.mark.parametrize(
    ("target", "machine", "reason"),
    [
        ("cascade-lake", LAPTOP, "this CPU lacks avx512_vnni, avx512bw, avx512dq, avx512f, avx512vl, so masking"),
        ("raspberry-pi-5", SERVER, "qemu-aarch64 is not installed"),
        ("gemmini", SERVER, "there is no simulator 'systolic' here"),
        ("nvidia-t4", SERVER, "edgeq knows no way to run the kernels of nvidia-t4 on another machine"),
    ],
)
def test_routes_that_cannot_run_say_why(target: str, machine: Machine, reason: str) -> None:
    route = choose_route(resolve(target, machine), machine)
    assert (route.where, route.start) == (NOT_RUN, None)
    assert route.reason.startswith(reason)


def test_without_a_compiler_nothing_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "mask_problem", lambda: "masking CPUID needs cc")
    assert choose_route(resolve("haswell", SERVER), SERVER).reason.startswith(
        "masking CPUID needs cc; qemu-x86_64 is not"
    )


def test_a_cpu_that_qemu_has_in_name_only_is_refused() -> None:
    target = emulating(resolve("nvidia-t4", SERVER), qemu={"arch": "x86_64", "cpu": "Icelake-Server"})
    assert "has no Icelake-Server: it silently runs a lesser CPU" in choose_route(target, SERVER).reason


def test_masks_are_cpuid_features() -> None:
    for profile in load_profiles().values():
        assert set(profile.emulate.get("mask", ())) <= FEATURES
    with pytest.raises(HardwareError, match=r"'avx9000', which is not a CPUID feature"):
        choose_route(emulating(resolve("haswell", SERVER), mask=["avx9000"]), SERVER)


def test_a_simulator_stands_for_the_device() -> None:
    asked = []

    @contextmanager
    def simulate(target: Target) -> Iterator[Open]:
        asked.append(target.name)
        yield open_session

    route = choose_route(resolve("gemmini", SERVER), SERVER, simulators={"systolic": simulate})
    assert (route.where, route.how) == (MODELLED, "the systolic simulator")
    assert route.start is not None
    with route.start() as running:
        assert running == Running(open_session, None)
    assert asked == ["gemmini"]


def test_this_machine_is_proven_too() -> None:
    machine = detect_machine()
    route = choose_route(resolve("auto", machine), machine)
    assert route.start is not None
    with route.start() as running:
        assert running.kernels is not None
    target = resolve("auto", machine)
    saturates = bool(target.profile.hazards.get("saturates_int16"))
    hazards = {"saturates_int16": [] if saturates else ["U8S8"]}
    other = dataclasses.replace(target, profile=dataclasses.replace(target.profile, hazards=hazards))
    route = choose_route(other, machine)
    assert route.start is not None
    with pytest.raises(CheckFailedError, match=r"this machine runs other kernels than the target"), route.start():
        pass


def emulating(target: Target, **emulate: Any) -> Target:
    return dataclasses.replace(target, emulate=emulate, files=(Path("x.toml"),))
