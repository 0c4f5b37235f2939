"""Provide emulated machines. Making one needs the network, so only CI does it by default."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from edgeq_device.system.features import read_features

from edgeq.emulate import routes
from edgeq.emulate.cache import home
from edgeq.emulate.emulator import find_emulator, load_emulators
from edgeq.emulate.machine import QemuProgram, find_qemu
from edgeq.emulate.routes import setup
from edgeq.emulate.sysroot import Sysroot, load_sysroot
from edgeq.errors import RuntimeUnavailableError
from tests.conftest import REPOSITORY

MAKE = "EDGEQ_TEST_EMULATORS"


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty cache for the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return home()


@pytest.fixture(scope="module")
def _machines() -> Iterator[None]:
    """Set a separate cache for the emulated ARM64 machine. In the cache that all tests share, every test that packages
    for an ARM64 target would run on it once it exists.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(REPOSITORY / ".pytest_cache" / "machines"))
        yield


@pytest.fixture(scope="module")
def arm64(_machines: None) -> tuple[QemuProgram, Sysroot]:
    """Return the emulated ARM64 machine, or skip the test."""
    emulator = find_emulator("arm64")
    if os.environ.get(MAKE) == "1":
        home().mkdir(parents=True, exist_ok=True)
        with (home() / "tests.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if load_sysroot(emulator) is None:  # setup also starts an existing machine, which takes long
                    setup("arm64")
            except RuntimeUnavailableError as error:
                pytest.skip(str(error))
    qemu, sysroot = find_qemu(emulator), load_sysroot(emulator)
    if qemu is None or sysroot is None:
        pytest.skip(f"there is no emulated ARM64 machine: set {MAKE}=1")
    return qemu, sysroot


@pytest.fixture(scope="session")
def haswell() -> str:
    """Return the name of a CPU that saturates, under qemu, or skip the test."""
    if find_qemu(load_emulators()["x86_64"]) is None or read_features()[0] != "x86_64":
        pytest.skip("qemu-x86_64 is not installed, or this is not a x86-64 machine")
    return "Haswell"


@pytest.fixture(scope="session")
def maskable(masked: None) -> None:
    if routes.mask_problem() or "avx512_vnni" not in read_features()[1]:
        pytest.skip(routes.mask_problem() or "this CPU has no AVX-512 VNNI to mask")
