"""Test how edgeq finds qemu and reads its output, with scripts in place of qemu."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq.emulate.emulator import load_emulators
from edgeq.emulate.machine import QemuProgram, build_command, check_cpuinfo, find_qemu, require_qemu
from edgeq.errors import HardwareError, RuntimeUnavailableError

X86, ARM = load_emulators()["x86_64"], load_emulators()["arm64"]
LEAVES_OUT = "warning: TCG doesn't support requested feature: CPUID.07H:EBX.{} [bit 16]"


def program(folder: Path, name: str, version: str, warning: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / name
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{name} version {version} (Debian)"; exit; fi\n'
        f'echo "{name}: {warning}" >&2\nexit 1\n'
    )
    script.chmod(0o755)
    return script


def test_the_newest_that_runs_is_taken(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    program(tmp_path / "bin", "qemu-aarch64", "7.2.19")
    found = find_qemu(ARM)
    assert found is not None
    assert (found.version, found.source) == ("7.2.19", "the system")
    program(own_home / "qemu", "qemu-aarch64", "10.0.2")
    (own_home / "qemu" / "lock.json").write_text('{"package": "qemu-user=1:10.0.2"}')
    assert require_qemu(ARM).source == "qemu-user=1:10.0.2"
    program(own_home / "qemu", "qemu-x86_64", "broken").write_text("not a program")
    assert find_qemu(X86) is None or require_qemu(X86).source == "the system"


def test_a_damaged_folder_of_programs_is_one_line(own_home: Path) -> None:
    program(own_home / "qemu", "qemu-aarch64", "10.0.2")
    for content in ("", "[]", '{"package": 1}', "[" * 100_000):
        (own_home / "qemu" / "lock.json").write_text(content)
        with pytest.raises(RuntimeUnavailableError, match=r"qemu/lock\.json"):
            find_qemu(ARM)


def test_none_at_all_says_what_to_install(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeUnavailableError, match=r"qemu-aarch64 is not installed.*edgeq emulate setup"):
        build_command(ARM, "cortex-a53")


@pytest.mark.parametrize("feature", ["avx512f", "avx512-vnni", "avx-vnni", "amx-int8"])
def test_a_cpu_that_loses_what_makes_it_is_refused(tmp_path: Path, feature: str) -> None:
    qemu = QemuProgram(program(tmp_path, "qemu-x86_64", "11.0", LEAVES_OUT.format(feature)), "11.0", "the system")
    with pytest.raises(HardwareError, match=f"has no FutureLake: it leaves out {feature}"):
        check_cpuinfo(qemu, X86, "FutureLake")


def test_a_cpu_that_loses_something_else_is_taken(tmp_path: Path) -> None:
    check_cpuinfo(QemuProgram(program(tmp_path, "q", "11.0", LEAVES_OUT.format("hle")), "11.0", ""), X86, "Haswell")


def test_a_cpu_that_qemu_does_not_know(tmp_path: Path) -> None:
    qemu = QemuProgram(program(tmp_path, "q", "7.2", "unable to find CPU model 'neoverse-n2'"), "7.2", "")
    with pytest.raises(HardwareError, match=r"7.2 has no CPU 'neoverse-n2'"):
        check_cpuinfo(qemu, ARM, "neoverse-n2")
