"""What is known of each emulated architecture: `targets/emulators/*.toml`, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edgeq.errors import HardwareError, OutputError, RuntimeUnavailableError, UsageError
from edgeq.hardware import document as doc
from edgeq.records import Positive, parse
from edgeq.resources import shipped, user_folder

Hex = Annotated[str, Meta(pattern="^[0-9a-f]+$", description="hexadecimal digits")]
Texts = tuple[str, ...]


@dataclass(frozen=True)
class Kernels:
    """[[kernels]]: instructions that only kernels for `feature` contain, as (mask, value) over the 32 bits of an
    instruction, in hexadecimal digits."""

    name: doc.Text
    feature: doc.Text
    patterns: tuple[tuple[Hex, Hex], ...]


@dataclass(frozen=True)
class QemuTable:
    """[qemu].

    Attributes:
        program: of qemu-user; `packages` may hold it.
        honest_cpuinfo: the qemu from which on the guest sees a /proc/cpuinfo of its own.
        missing: parts of qemu's warnings which mean that the CPU that runs is not the one that was named.
        refused: patterns of CPU names for which that is known.
    """

    program: doc.Text
    honest_cpuinfo: doc.Version
    packages: Texts
    missing: Texts
    refused: Texts


@dataclass(frozen=True)
class Recipe:
    """[sysroot]: what a private root file system is made of; packages are "name" or "name|another name|..."."""

    interpreter: doc.Text
    packages: Texts
    python_packages: Texts
    wheels: Texts
    wheel_platforms: Texts
    leave_out: Texts

    def leaves_out(self, name: str) -> bool:
        """Whether a file or package of this name is not taken."""
        return any(fnmatchcase(name, pattern) for pattern in self.leave_out)


@dataclass(frozen=True)
class Pins:
    """[pins]: what packages, as "name=version", and wheels have to be, by SHA-256."""

    packages: Mapping[str, doc.Text] = field(default_factory=dict)
    wheels: Mapping[str, doc.Text] = field(default_factory=dict)


@dataclass(frozen=True)
class Speed:
    """[speed]: about how many multiply-accumulates a second an emulated CPU does, in int8 and in float."""

    int8: Positive
    float: Positive


@dataclass(frozen=True)
class Emulator:
    """One emulated architecture: targets/emulators/NAME.toml.

    Attributes:
        elf_machine: e_machine of its programs.
        sysroot: the recipe of its root file system; None where the host's own is used.
        kernels: what distinguishes kernels in translated code, the least demanding first.
        name: the file's name without suffix; also that of the architecture.
    """

    title: doc.Text
    architecture: doc.Text
    elf_machine: int
    qemu: QemuTable
    speed: Speed
    sysroot: Recipe | None = None
    pins: Pins = Pins()
    kernels: tuple[Kernels, ...] = ()
    name: str = ""

    @property
    def program(self) -> str:
        """Of qemu-user."""
        return self.qemu.program

    def check_cpu(self, cpu: str) -> None:
        """Refuse the name of a CPU that qemu replaces by another without a warning.

        Raises:
            HardwareError: qemu would run another CPU in its place.
        """
        if any(fnmatchcase(cpu, pattern) for pattern in self.qemu.refused):
            raise HardwareError(
                f"{self.program} has no {cpu}: it silently runs a lesser CPU under that name",
                "Name a CPU that it has in [emulate], or check on a machine of that kind",
            )


def load_emulators() -> dict[str, Emulator]:
    """All emulated architectures by name.

    Raises:
        HardwareError: a file that is not as it should be.
    """
    documents = doc.read_folder(shipped("targets") / "emulators", Emulator)
    return {
        name: replace(parse(document.content, Emulator, document.file, HardwareError), name=name)
        for name, document in documents.items()
    }


def emulator_named(name: str) -> Emulator:
    """The emulator for an architecture that needs a root file system.

    Raises:
        UsageError: there is none of that name, or it needs nothing set up.
    """
    known = {key: emulator for key, emulator in load_emulators().items() if emulator.sysroot is not None}
    if name not in known:
        raise UsageError(f"no emulated machine is called {name!r}", f"There are {', '.join(known)}")
    return known[name]


def home() -> Path:
    """Return the folder of emulated machines, in the user's cache (XDG_CACHE_HOME).

    Raises:
        RuntimeUnavailableError: the user has none.
    """
    folder = user_folder("cache")
    if folder is None:
        raise RuntimeUnavailableError("there is no home folder to keep emulated machines in", "Set XDG_CACHE_HOME")
    return folder / "emulate"


def check_writable() -> None:
    """Refuse early where the cache cannot be written.

    Raises:
        OutputError: it cannot.
    """
    try:
        home().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{home()} cannot be made ({error.strerror})", "Set XDG_CACHE_HOME to another folder"
        ) from error
