"""What is known of each emulated architecture: `targets/emulators/*.toml`, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import platformdirs
from edgeq_device.version import parse_version
from msgspec import Meta

from edgeq.errors import HardwareError, UsageError
from edgeq.hardware import document as doc
from edgeq.records import Positive, parse
from edgeq.resources import shipped

Hex = Annotated[str, Meta(pattern="^[0-9a-f]+$", description="hexadecimal digits")]
Texts = tuple[str, ...]


@dataclass(frozen=True)
class KernelsTable:
    """[[kernels]]: pairs of mask and value, in hexadecimal digits."""

    name: doc.Text
    feature: doc.Text
    patterns: tuple[tuple[Hex, Hex], ...]


@dataclass(frozen=True)
class QemuTable:
    """[qemu]; see `Emulator`."""

    program: doc.Text
    honest_cpuinfo: doc.Version
    packages: Texts
    missing: Texts
    refused: Texts


@dataclass(frozen=True)
class SysrootTable:
    """[sysroot]; see `Recipe`."""

    interpreter: doc.Text
    packages: Texts
    python_packages: Texts
    wheels: Texts
    wheel_platforms: Texts
    leave_out: Texts


@dataclass(frozen=True)
class Pins:
    """[pins]: versions by name."""

    packages: Mapping[str, doc.Text] = field(default_factory=dict)
    wheels: Mapping[str, doc.Text] = field(default_factory=dict)


@dataclass(frozen=True)
class Speed:
    """[speed]: about how many multiply-accumulates a second an emulated CPU does, in int8 and in float."""

    int8: Positive
    float: Positive


@dataclass(frozen=True)
class EmulatorFile:
    """targets/emulators/*.toml."""

    title: doc.Text
    architecture: doc.Text
    elf_machine: int
    qemu: QemuTable
    speed: Speed
    sysroot: SysrootTable | None = None
    pins: Pins = Pins()
    kernels: tuple[KernelsTable, ...] = ()


@dataclass(frozen=True)
class Kernels:
    """Instructions that only kernels for `feature` contain, as (mask, value) over the 32 bits of an instruction."""

    name: str
    feature: str
    patterns: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Recipe:
    """What a private root file system is made of; packages are "name" or "name|another name|..."."""

    packages: tuple[str, ...]
    interpreter: str
    python_packages: tuple[str, ...]
    wheels: tuple[str, ...]
    wheel_platforms: tuple[str, ...]
    leave_out: tuple[str, ...]
    pinned_packages: Mapping[str, str]
    pinned_wheels: Mapping[str, str]

    def leaves_out(self, name: str) -> bool:
        """Whether a file or package of this name is not taken."""
        return any(fnmatchcase(name, pattern) for pattern in self.leave_out)


@dataclass(frozen=True)
class Emulator:
    """One emulated architecture.

    Attributes:
        name: the file's name without suffix; also that of the architecture.
        elf_machine: e_machine of its programs.
        program: of qemu-user; `packages` may hold it.
        honest_cpuinfo: the qemu from which on the guest sees a /proc/cpuinfo of its own.
        missing: parts of qemu's warnings which mean that the CPU that runs is not the one that was named.
        refused: patterns of CPU names for which that is known.
        speed: about how fast it is.
        recipe: of the root file system; None where the host's own is used.
        kernels: what distinguishes kernels in translated code, the least demanding first.
    """

    name: str
    title: str
    architecture: str
    elf_machine: int
    program: str
    packages: tuple[str, ...]
    honest_cpuinfo: tuple[int, ...]
    missing: tuple[str, ...]
    refused: tuple[str, ...]
    speed: Speed
    recipe: Recipe | None = None
    kernels: tuple[Kernels, ...] = field(default=())

    def check_cpu(self, cpu: str) -> None:
        """Refuse the name of a CPU that qemu replaces by another without a warning.

        Raises:
            HardwareError: qemu would run another CPU in its place.
        """
        if any(fnmatchcase(cpu, pattern) for pattern in self.refused):
            raise HardwareError(
                f"{self.program} has no {cpu}: it silently runs a lesser CPU under that name",
                "Name a CPU that it has in [emulate], or check on a machine of that kind",
            )


def load_emulators() -> dict[str, Emulator]:
    """All emulated architectures by name.

    Raises:
        HardwareError: a file that is not as it should be.
    """
    documents = doc.read_folder(shipped("targets") / "emulators", EmulatorFile)
    return {name: _emulator(document) for name, document in documents.items()}


def emulator_named(name: str) -> Emulator:
    """The emulator for an architecture that needs a root file system.

    Raises:
        UsageError: there is none of that name, or it needs nothing set up.
    """
    known = {key: emulator for key, emulator in load_emulators().items() if emulator.recipe is not None}
    if name not in known:
        raise UsageError(f"no emulated machine is called {name!r}", f"There are {', '.join(known)}")
    return known[name]


def home() -> Path:
    """Where emulated machines lie: in the user's cache (XDG_CACHE_HOME)."""
    return platformdirs.user_cache_path("edgeq") / "emulate"


def _emulator(document: doc.Document) -> Emulator:
    file = parse(document.content, EmulatorFile, document.file, HardwareError)
    return Emulator(
        name=document.name,
        title=file.title,
        architecture=file.architecture,
        elf_machine=file.elf_machine,
        program=file.qemu.program,
        packages=file.qemu.packages,
        honest_cpuinfo=parse_version(file.qemu.honest_cpuinfo),
        missing=file.qemu.missing,
        refused=file.qemu.refused,
        speed=file.speed,
        recipe=_recipe(file.sysroot, file.pins) if file.sysroot else None,
        kernels=tuple(
            Kernels(table.name, table.feature, tuple((int(mask, 16), int(value, 16)) for mask, value in table.patterns))
            for table in file.kernels
        ),
    )


def _recipe(table: SysrootTable, pins: Pins) -> Recipe:
    return Recipe(
        packages=table.packages,
        interpreter=table.interpreter,
        python_packages=table.python_packages,
        wheels=table.wheels,
        wheel_platforms=table.wheel_platforms,
        leave_out=table.leave_out,
        pinned_packages=pins.packages,
        pinned_wheels=pins.wheels,
    )
