"""qemu-user: the system's own, or one from the distribution's packages in the user's cache."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edgeq_device.version import parse_version

from edgeq.emulate.apt import Apt, Package, unpack_programs
from edgeq.emulate.commands import run, which
from edgeq.emulate.emulator import Emulator, check_writable, home, load_emulators
from edgeq.errors import RuntimeUnavailableError
from edgeq.ownership import Judge, Ownership, read_object
from edgeq.progress import SILENT, Progress
from edgeq.records import plain, read_json

FOLDER = "qemu"
_INSTALL = "Install it (Debian, Ubuntu: apt install qemu-user; Fedora: dnf install qemu-user)"


@dataclass(frozen=True)
class Qemu:
    """A qemu-user program that runs here. `source` is "the system" or the package that it came from."""

    program: Path
    version: str
    source: str

    @property
    def key(self) -> tuple[int, ...]:
        """The version as numbers, to compare."""
        return parse_version(self.version)

    def is_honest(self, emulator: Emulator) -> bool:
        """Whether it shows the guest a /proc/cpuinfo of its own."""
        return self.key >= parse_version(emulator.qemu.honest_cpuinfo)


@dataclass(frozen=True)
class _Lock:
    package: str
    sha256: str = ""


def find_qemu(emulator: Emulator) -> Qemu | None:
    """The newest qemu for `emulator` that runs here; None where there is none.

    Raises:
        RuntimeUnavailableError: the folder of edgeq's own programs is damaged.
    """
    lock = home() / FOLDER / "lock.json"
    fix = f"Remove {lock.parent} and run: edgeq emulate setup"
    source = read_json(lock, _Lock, RuntimeUnavailableError, fix).package if lock.is_file() else ""
    own = home() / FOLDER / emulator.program
    candidates = [(own, source)] if own.is_file() else []
    for name in (emulator.program, f"{emulator.program}-static"):
        found = which(name)
        if found is not None:
            candidates.append((Path(found), "the system"))
    found_here = [Qemu(path, version, where) for path, where in candidates if (version := _version(path)) is not None]
    return max(found_here, key=lambda qemu: qemu.key, default=None)


def require_qemu(emulator: Emulator) -> Qemu:
    """As `find_qemu`.

    Raises:
        RuntimeUnavailableError: there is none.
    """
    found = find_qemu(emulator)
    if found is None:
        fix = f"{_INSTALL}, or let edgeq unpack one: edgeq emulate setup"
        raise RuntimeUnavailableError(f"{emulator.program} is not installed", fix)
    return found


def fetch_qemu(*, sources: Path | None = None, progress: Progress = SILENT) -> Qemu | None:
    """Unpack the distribution's newest qemu-user, its backports included, into the cache; None where there is none.

    Only programs without libraries of their own (static ones) can be used so; of others the system's package manager
    has to take care.
    """
    folder = home() / FOLDER
    emulators = load_emulators().values()
    names = {n for emulator in emulators for n in (emulator.program, f"{emulator.program}-static")}
    packages = tuple(dict.fromkeys(name for emulator in emulators for name in emulator.qemu.packages))
    check_writable()
    with tempfile.TemporaryDirectory(dir=home(), prefix="qemu-") as work, progress.stage("Fetching qemu-user"):
        apt = _with_backports(Path(work), sources)
        offers = [offer for found in apt.offers(packages).values() for offer in found]
        for package in sorted(offers, key=_newest_first, reverse=True):
            stage = Path(work) / "programs"
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir()
            taken = unpack_programs(apt.download([package], Path(work))[0], stage, names)
            if taken and all(_version(path) for path in taken):
                for path in taken:
                    path.rename(stage / path.name.removesuffix("-static"))
                lock = json.dumps(plain(_Lock(package.label, package.sha256)))
                (stage / "lock.json").write_text(lock + "\n", encoding="utf-8")
                PROGRAMS.check(folder)
                if folder.exists():
                    shutil.rmtree(folder)
                stage.rename(folder)
                _version.cache_clear()
                return find_qemu(next(iter(emulators)))
    return None


def _judge(folder: Path) -> Judge | None:
    lock = read_object(folder / "lock.json")
    if lock is None or not {"package", "sha256"} <= lock.keys():
        return None
    return lambda name: name in ("lock.json", *(emulator.program for emulator in load_emulators().values()))


PROGRAMS = Ownership("folder of edgeq's programs", _judge)
"""The programs that were unpacked, and the lock file that names their package."""


def _newest_first(package: Package) -> tuple[tuple[int, ...], int]:
    """By upstream version, then the smaller download."""
    upstream = package.version.split(":")[-1]
    return parse_version(re.sub(r"[^0-9.].*", "", upstream)), -package.size


def _with_backports(work: Path, sources: Path | None) -> Apt:
    """A private apt with the system's archives and, where the distribution keeps one, their backports."""
    plain = Apt(work / "apt", "", sources)
    plain.update()
    codename = _codename()
    lines = [archive.line(f"{codename}-backports") for archive in plain.archives() if archive.release == codename]
    if not lines:
        return plain
    file = work / "backports.list"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    backports = Apt(work / "backports", "", file)
    try:
        backports.update()
    except RuntimeUnavailableError:
        return plain  # this distribution, or its mirror, has none
    return backports if backports.offers(["qemu-user"]) else plain


def _codename() -> str:
    file = Path("/etc/os-release")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(r'^VERSION_CODENAME="?([^"\n]*)', text, re.M)
    return found.group(1) if found else ""


@cache
def _version(program: Path) -> str | None:
    """What `--version` prints; None where the program does not run here."""
    if not os.access(program, os.X_OK):
        return None
    try:
        output = run([str(program), "--version"], "")
    except (RuntimeUnavailableError, OSError):
        return None
    found = re.search(r"version (\d+(?:\.\d+)*)", output)
    return found.group(1) if found else None
