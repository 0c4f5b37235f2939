"""Test that nothing in the cache of emulated machines runs if other users could have changed it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeq.emulate import routes
from edgeq.emulate.emulator import find_emulator, load_emulators
from edgeq.emulate.machine import build_command, find_qemu
from edgeq.emulate.routes import build_masked_command
from edgeq.emulate.sysroot import load_sysroot
from edgeq.errors import RuntimeUnavailableError
from tests.cli import process
from tests.emulate.test_qemu import program

ARM = load_emulators()["arm64"]
EXPOSED = r"can be changed by others\. Remove .*, set XDG_CACHE_HOME to a folder that only you can write, and run: "
pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes and owners as POSIX has them")


@pytest.fixture
def fetched(own_home: Path) -> Path:
    """Write a qemu as `setup` unpacks it, which leaves a mark when it runs. Return the mark."""
    place = program(own_home / "qemu", "qemu-aarch64", "10.0.2")
    mark = own_home.parent / "ran"
    place.write_text(place.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\necho >>{mark}\n"))
    (own_home / "qemu" / "lock.json").write_text('{"package": "qemu-user=1:10.0.2"}')
    found = find_qemu(ARM)
    assert found is not None
    assert found.source == "qemu-user=1:10.0.2"
    mark.unlink()
    return mark


PLACES: dict[str, Callable[[Path], Path]] = {
    "the program": lambda home: home / "qemu" / "qemu-aarch64",
    "its record": lambda home: home / "qemu" / "lock.json",
    "its folder": lambda home: home / "qemu",
    "the machines": lambda home: home,
    "edgeq's folder": lambda home: home.parent,
    "the cache": lambda home: home.parent.parent,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_qemu_that_others_can_change_does_not_run(own_home: Path, fetched: Path, place: str, mode: int) -> None:
    if mode == 0o775 and os.geteuid() != 0:
        pytest.skip("the group may be the user's own")
    PLACES[place](own_home).chmod(mode)
    for call in (find_qemu, lambda emulator: build_command(emulator, "max")):
        with pytest.raises(RuntimeUnavailableError, match=EXPOSED + "edgeq emulate setup"):
            call(ARM)
    done = process.run("emulate", "status", cwd=own_home.parent)
    assert done.returncode == RuntimeUnavailableError.exit_code
    assert "can be changed by others" in done.stderr
    assert not fetched.exists()


def test_a_root_file_system_that_others_can_change_is_not_used(own_home: Path) -> None:
    python = own_home / "arm64" / "root" / "usr" / "bin" / "python3.11"
    python.parent.mkdir(parents=True)
    python.write_bytes(b"")
    (own_home / "arm64" / "lock.json").write_text("{}")
    for place in (python, python.parent, own_home / "arm64", own_home):
        place.chmod(0o777)
        with pytest.raises(RuntimeUnavailableError, match=EXPOSED + "edgeq emulate setup arm64"):
            load_sysroot(find_emulator("arm64"))
        place.chmod(0o755)


@pytest.mark.skipif(bool(routes.mask_problem()), reason=routes.mask_problem() or "-")
def test_a_masked_runtime_that_others_can_change_is_not_loaded(own_home: Path) -> None:
    folder = build_masked_command(["avx512_vnni"]).folders[0]
    assert folder.is_relative_to(own_home)
    for place in (folder / "cpuid_mask.so", folder / "onnxruntime", folder, folder.parent, own_home):
        before = place.stat().st_mode
        place.chmod(0o777)
        with pytest.raises(RuntimeUnavailableError, match=EXPOSED):
            build_masked_command(["avx512_vnni"])
        place.chmod(before)
    assert build_masked_command(["avx512_vnni"]).folders[0] == folder


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_does_not_run(own_home: Path, fetched: Path) -> None:
    os.chown(own_home / "qemu" / "qemu-aarch64", 65534, -1)
    with pytest.raises(RuntimeUnavailableError, match=EXPOSED):
        find_qemu(ARM)
    assert not fetched.exists()
