from __future__ import annotations

from pathlib import Path

import pytest

from edgeq.emulate.emulator import find_emulator, load_emulators
from edgeq.errors import HardwareError, UsageError
from edgeq.hardware.profile import load_profiles
from edgeq.hardware.target import load_targets


def test_every_target_names_an_emulator_and_a_cpu_that_are_known() -> None:
    emulators = {emulator.program: emulator for emulator in load_emulators().values()}
    wanted = [p.emulate for p in load_profiles().values()] + [t.emulate for t in load_targets().values()]
    named = [emulate["qemu"] for emulate in wanted if "qemu" in emulate]
    assert named
    for qemu in named:
        emulators[f"qemu-{qemu['arch']}"].check_cpu(qemu["cpu"])


@pytest.mark.parametrize(
    "cpu", ["Skylake-Server", "Skylake-Server-v5", "Icelake-Server-noTSX", "EPYC-Genoa", "SapphireRapids", "Cooperlake"]
)
def test_cpus_that_qemu_has_in_name_only_are_refused(cpu: str) -> None:
    with pytest.raises(HardwareError, match=f"has no {cpu}: it silently runs a lesser CPU"):
        load_emulators()["x86_64"].check_cpu(cpu)


@pytest.mark.parametrize("cpu", ["Haswell", "Nehalem", "Skylake-Client", "EPYC-Milan"])
def test_cpus_that_qemu_has_are_taken(cpu: str) -> None:
    load_emulators()["x86_64"].check_cpu(cpu)


def test_a_machine_that_cannot_be_made_is_refused() -> None:
    assert find_emulator("arm64").sysroot is not None
    for name in ("x86_64", "vax"):
        with pytest.raises(UsageError, match=f"there is no emulated machine '{name}'"):
            find_emulator(name)


def test_the_recipe_leaves_out_documentation_and_tests() -> None:
    recipe = find_emulator("arm64").sysroot
    assert recipe is not None
    assert recipe.leaves_out("usr/share/doc/libc6/copyright")
    assert recipe.leaves_out("site/numpy/linalg/tests/test_linalg.py")
    assert not recipe.leaves_out("usr/lib/python3.11/json/__init__.py")
    assert not recipe.leaves_out("site/numpy/testing/__init__.py")


def test_machines_lie_in_the_cache_of_the_user(own_home: Path, tmp_path: Path) -> None:
    assert own_home == tmp_path / "cache" / "edgeq" / "emulate"
