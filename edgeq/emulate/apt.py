"""The distribution's packages of any architecture, unpacked but not installed.

apt runs with state, cache and status of its own: it needs no root and changes nothing on the system. Where packages
come from, and whose signatures count, is what the system's own sources define."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path, PurePosixPath

from edgeq.errors import RuntimeUnavailableError
from edgeq.util.ownership import sha256


def which(program: str) -> str | None:
    """Where a program lies on PATH; None where it is not installed.

    Relative and empty entries of PATH, and Windows' habit of looking there first, lead into the working directory: what
    lies beside a model is not run.
    """
    path = search_path()
    found = shutil.which(program, path=path) if path else None
    return found if found is not None and Path(found).is_absolute() else None


def search_path() -> str:
    """Return PATH without the entries that lead into the working directory."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if Path(folder).is_absolute())


def find(program: str, fix: str) -> str:
    """Where a program lies.

    Raises:
        RuntimeUnavailableError: it is not installed; `fix`: how to get it.
    """
    found = which(program)
    if found is None:
        raise RuntimeUnavailableError(f"{program} is not installed", fix)
    return found


def run(command: Sequence[str], fix: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Standard output of a command that has to succeed; its messages are in English.

    Raises:
        RuntimeUnavailableError: it failed: the last line of its errors, and `fix`.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        output = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in output if line.startswith(("E:", "ERROR", "error"))] or output[-1:]
        raise RuntimeUnavailableError(
            f"{Path(command[0]).name} failed: {errors[0] if errors else f'exit code {done.returncode}'}", fix
        )
    return done.stdout


_FIX = "On a system without apt, unpack a root file system yourself and name it with --sysroot"
_ONLINE = "Check the network and the system's package sources, or name a root file system with --sysroot"


@dataclass(frozen=True)
class Package:
    """One package as the signed index has it."""

    name: str
    version: str
    sha256: str
    size: int
    depends: str

    @property
    def label(self) -> str:
        """ "name=version", as apt takes it."""
        return f"{self.name}={self.version}"


@dataclass(frozen=True)
class Archive:
    """One part of one release on one server; `keys` is the file of those whose signatures count, "" for all known."""

    site: str
    release: str
    component: str
    keys: str

    def line(self, release: str) -> str:
        """A line of a sources file for another release of the same archive."""
        signed = f"[signed-by={self.keys}] " if self.keys else ""
        return f"deb {signed}{self.site} {release} {self.component}"


@dataclass(frozen=True)
class Apt:
    """A private apt.

    Attributes:
        state: its folder.
        architecture: of the packages, as the distribution spells it; "" is the system's own.
        sources: a sources file in place of the system's.
    """

    state: Path
    architecture: str = ""
    sources: Path | None = None

    @property
    def _options(self) -> tuple[str, ...]:
        state = self.state
        options = {
            "Dir::State": state,
            "Dir::State::Lists": state / "lists",
            "Dir::State::status": state / "status",
            "Dir::Cache": state,
            "Dir::Cache::Archives": state / "archives",
            "APT::Sandbox::User": "",
            "Acquire::Languages": "none",
            "Acquire::Retries": "2",
        }
        if self.architecture:
            options |= {"APT::Architecture": self.architecture, "APT::Architectures": self.architecture}
        if self.sources is not None:
            options |= {"Dir::Etc::sourcelist": self.sources, "Dir::Etc::sourceparts": "-"}
        return tuple(part for key, value in options.items() for part in ("-o", f"{key}={value}"))

    def update(self) -> None:
        """Fetch the lists of packages.

        Raises:
            RuntimeUnavailableError: there is no apt, or its sources cannot be reached.
        """
        for folder in ("lists/partial", "archives/partial"):
            (self.state / folder).mkdir(parents=True, exist_ok=True)
        (self.state / "status").touch()
        self._apt("apt-get", "update", "-qq", "-o", "APT::Update::Error-Mode=any")

    def offers(self, names: Sequence[str]) -> dict[str, list[Package]]:
        """Every version of each package that the index offers, the newest first; unknown names are left out."""
        listed = set(self._apt("apt-cache", "policy", *names).splitlines())
        known = [name for name in names if f"{name}:" in listed]
        offers: dict[str, list[Package]] = {}
        for text in self._apt("apt-cache", "show", *known).split("\n\n") if known else ():
            fields = Parser().parsestr(text)
            if fields["Package"] in known and fields["SHA256"]:
                depends = ", ".join(filter(None, (fields["Pre-Depends"], fields["Depends"])))
                package = Package(fields["Package"], fields["Version"], fields["SHA256"], int(fields["Size"]), depends)
                offers.setdefault(package.name, []).append(package)
        return offers

    def download(self, packages: Sequence[Package], folder: Path) -> list[Path]:
        """Fetch packages into `folder`, except those that lie there already, and hold them against the index.

        Raises:
            RuntimeUnavailableError: one cannot be fetched, or is not what the index promised.
        """
        places = {package: folder / f"{package.name}.deb" for package in packages}
        missing = [p for p, place in places.items() if not place.is_file() or sha256(place) != p.sha256]
        with tempfile.TemporaryDirectory(dir=folder, prefix="fetching-") as work:
            if missing:
                self._apt("apt-get", "download", "-qq", *(package.label for package in missing), cwd=Path(work))
            fetched = {sha256(file): file for file in Path(work).glob("*.deb")}
            for package in missing:
                if package.sha256 not in fetched:
                    raise RuntimeUnavailableError(f"{package.label} is not what the package index promised", _ONLINE)
                fetched[package.sha256].replace(places[package])
        return list(places.values())

    def archives(self) -> list[Archive]:
        """The archives that the lists came from."""
        form = "$(SITE)\t$(RELEASE)\t$(COMPONENT)\t$(SOURCESENTRY)"
        output = self._apt("apt-get", "indextargets", "--format", form, "Created-By: Packages")
        lines = [line.split("\t") for line in dict.fromkeys(output.splitlines())]
        return [Archive(site, release, component, _keys(entry)) for site, release, component, entry in lines]

    def _apt(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        return run([find(program, _FIX), *self._options, *arguments], _ONLINE, cwd=cwd)


def _keys(entry: str) -> str:
    """The key file that a sources file names, given "FILE:LINE"."""
    file = Path(entry.rpartition(":")[0])
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found = re.search(r"signed-by\s*[:=]\s*(/[^\s\],]+)", text, re.IGNORECASE)
    return found.group(1) if found else ""


def unpack(deb: Path, folder: Path) -> None:
    """Unpack a package; none of its scripts is run.

    Raises:
        RuntimeUnavailableError: dpkg-deb is missing, or the package is damaged.
    """
    run([find("dpkg-deb", _FIX), "-x", str(deb), str(folder)], f"Remove {deb} and run again")


def unpack_programs(deb: Path, folder: Path, names: Collection[str]) -> list[Path]:
    """Take the plain files of these names, wherever they lie in a package, into `folder`; nothing else is written.

    Raises:
        RuntimeUnavailableError: dpkg-deb is missing, or the package is damaged.
    """
    command = [find("dpkg-deb", _FIX), "--fsys-tarfile", str(deb)]
    taken = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                for member in tar:
                    name = PurePosixPath(member.name).name
                    source = tar.extractfile(member) if name in names and member.isfile() else None
                    if source is not None:
                        place = folder / name
                        with place.open("wb") as sink:
                            shutil.copyfileobj(source, sink, 1 << 20)
                        place.chmod(0o755)
                        taken.append(place)
        except (tarfile.TarError, EOFError) as error:
            raise RuntimeUnavailableError(f"{deb} cannot be unpacked", "Remove it and run again") from error
    return taken
