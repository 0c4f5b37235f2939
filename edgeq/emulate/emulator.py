"""Read the description of each emulated architecture (`targets/emulators/*.toml`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated

from msgspec import Meta

from edgeq.errors import HardwareError, UsageError
from edgeq.hardware import profile
from edgeq.util.folders import shipped
from edgeq.util.records import Positive, parse

Hex = Annotated[str, Meta(pattern="^[0-9a-f]+$", description="hexadecimal digits")]
Texts = tuple[str, ...]


@dataclass(frozen=True)
class Kernels:
    """Describe a [[kernels]] table: instructions that only kernels for `feature` contain.

    Attributes:
        patterns: pairs (mask, value) for the 32 bits of an instruction, in hexadecimal digits.
    """

    name: profile.Text
    feature: profile.Text
    patterns: tuple[tuple[Hex, Hex], ...]


@dataclass(frozen=True)
class QemuTable:
    """Describe the [qemu] table.

    Attributes:
        program: the program of qemu-user.
        packages: packages that may contain the program.
        honest_cpuinfo: the first qemu version that shows the guest a /proc/cpuinfo of the emulated CPU.
        missing: texts in qemu's warnings that show that the running CPU is not the named one.
        refused: patterns of CPU names for which qemu is known to run another CPU.
    """

    program: profile.Text
    honest_cpuinfo: profile.Version
    packages: Texts
    missing: Texts
    refused: Texts


@dataclass(frozen=True)
class Recipe:
    """Describe the [sysroot] table, which lists the contents of a private root file system.

    Attributes:
        packages: entries of the form "name" or "name|another name|...".
    """

    interpreter: profile.Text
    packages: Texts
    python_packages: Texts
    wheels: Texts
    wheel_platforms: Texts
    leave_out: Texts

    def leaves_out(self, name: str) -> bool:
        """Return whether the recipe leaves out files or packages with this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.leave_out)


@dataclass(frozen=True)
class Pins:
    """Describe the [pins] table: the SHA-256 of required packages ("name=version") and of wheels."""

    packages: Mapping[str, profile.Text] = field(default_factory=dict)
    wheels: Mapping[str, profile.Text] = field(default_factory=dict)


@dataclass(frozen=True)
class EmulatedSpeed:
    """Describe the [speed] table: approximate multiply-accumulates per second of an emulated CPU, in int8 and float."""

    int8: Positive
    float: Positive


@dataclass(frozen=True)
class Emulator:
    """Describe one emulated architecture: targets/emulators/NAME.toml.

    Attributes:
        elf_machine: e_machine in the ELF header of the architecture's programs.
        sysroot: the recipe of its root file system; None if it uses the host's.
        kernels: patterns by which kernels are recognised in translated code. Kernels that require the least of the CPU
            come first.
        name: the file's name without suffix, which is also the name of the architecture.
    """

    title: profile.Text
    architecture: profile.Text
    elf_machine: int
    qemu: QemuTable
    speed: EmulatedSpeed
    sysroot: Recipe | None = None
    pins: Pins = Pins()
    kernels: tuple[Kernels, ...] = ()
    name: str = ""

    @property
    def program(self) -> str:
        """Return the name of the qemu-user program."""
        return self.qemu.program

    def check_cpu(self, cpu: str) -> None:
        """Refuse the name of a CPU if qemu would run another CPU without a warning.

        Raises:
            HardwareError: qemu would run another CPU.
        """
        # The kernels of the lesser CPU would pass every check and prove nothing about the target.
        if any(fnmatchcase(cpu, pattern) for pattern in self.qemu.refused):
            raise HardwareError(
                f"{self.program} has no {cpu}: it silently runs a lesser CPU under that name",
                "Name a CPU that it has in [emulate], or check on a machine of that kind",
            )


def load_emulators() -> dict[str, Emulator]:
    """Return all emulated architectures by name.

    Raises:
        HardwareError: a description is not valid.
    """
    documents = profile.read_folder(shipped("targets") / "emulators", Emulator)
    return {
        # The name is the file's, so a description cannot disagree with it.
        name: replace(parse(document.content, Emulator, document.file, HardwareError), name=name)
        for name, document in documents.items()
    }


def find_emulator(name: str) -> Emulator:
    """Return the emulator for an architecture that needs a root file system.

    Raises:
        UsageError: there is no emulator of that name, or the emulator needs no setup.
    """
    # An emulator that uses the host's own files needs no setup, so it is not offered.
    emulators = {key: emulator for key, emulator in load_emulators().items() if emulator.sysroot is not None}
    if name not in emulators:
        raise UsageError(f"there is no emulated machine {name!r}", f"There are {', '.join(emulators)}")
    return emulators[name]
