"""What is known of each emulated architecture: `targets/emulators/*.toml`, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import platformdirs

from edgeq.errors import HardwareError, UsageError
from edgeq.hardware import document as doc
from edgeq.resources import shipped

_HEX_PAIRS = doc.Kind(
    "a list of pairs of hexadecimal texts",
    lambda v: isinstance(v, list) and all(isinstance(p, list) and len(p) == 2 and _are_hex(p) for p in v),
)
_TABLES = doc.Kind("a list of tables", lambda v: isinstance(v, list) and all(isinstance(x, dict) for x in v))
_SCHEMA: doc.Schema = {
    "title": doc.TEXT,
    "architecture": doc.TEXT,
    "elf_machine": doc.INTEGER,
    "qemu": {
        "program": doc.TEXT,
        "honest_cpuinfo": doc.VERSION,
        **dict.fromkeys(("packages", "missing", "refused"), doc.TEXTS),
    },
    "sysroot": {
        "interpreter": doc.TEXT,
        **dict.fromkeys(("packages", "python_packages", "wheels", "wheel_platforms", "leave_out"), doc.TEXTS),
    },
    "pins": {"packages": {"*": doc.TEXT}, "wheels": {"*": doc.TEXT}},
    "kernels": _TABLES,
}
_KERNELS: doc.Schema = {"name": doc.TEXT, "feature": doc.TEXT, "patterns": _HEX_PAIRS}


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
    documents = doc.read_folder(shipped("targets") / "emulators", _SCHEMA)
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


def _are_hex(pair: list[Any]) -> bool:
    return all(isinstance(text, str) and set(text) <= set("0123456789abcdef") and text for text in pair)


def _emulator(document: doc.Document) -> Emulator:
    content, qemu = document.content, document.content["qemu"]
    kernels = []
    for table in content.get("kernels", ()):
        doc.check(table, _KERNELS, document.file, "kernels")
        pairs = tuple((int(mask, 16), int(value, 16)) for mask, value in table["patterns"])
        kernels.append(Kernels(table["name"], table["feature"], pairs))
    try:
        return Emulator(
            name=document.name,
            title=content["title"],
            architecture=content["architecture"],
            elf_machine=content["elf_machine"],
            program=qemu["program"],
            packages=tuple(qemu["packages"]),
            honest_cpuinfo=doc.version_key(qemu["honest_cpuinfo"]),
            missing=tuple(qemu["missing"]),
            refused=tuple(qemu["refused"]),
            recipe=_recipe(content["sysroot"], content.get("pins", {})) if "sysroot" in content else None,
            kernels=tuple(kernels),
        )
    except KeyError as error:
        raise HardwareError(f"{document.file}: {error.args[0]} is missing", "Add it") from error


def _recipe(content: Mapping[str, Any], pins: Mapping[str, Any]) -> Recipe:
    lists = ("packages", "python_packages", "wheels", "wheel_platforms", "leave_out")
    return Recipe(
        **{key: tuple(content[key]) for key in lists},
        interpreter=content["interpreter"],
        pinned_packages=pins.get("packages", {}),
        pinned_wheels=pins.get("wheels", {}),
    )
