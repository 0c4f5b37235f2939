"""Make a root file system of another architecture, with Python, numpy and onnxruntime, that qemu can run.

The distribution's packages for that architecture are unpacked but not installed. edgeq runs apt with a state, cache and
status of its own, so apt needs no root access and changes nothing on the system. The system's own apt sources define
where packages come from, and which signatures are valid.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path, PurePosixPath

from edgeq_device.system.files import open_file
from edgeq_device.system.programs import build_child_environment, find_program

from edgeq.arguments import as_options
from edgeq.emulate.cache import check_place, home
from edgeq.emulate.emulator import Emulator, Recipe
from edgeq.errors import RuntimeUnavailableError, UsageError
from edgeq.util.display import SILENT, Progress
from edgeq.util.marker import MARKER, is_marker, read_object, sha256, write_marker
from edgeq.util.ownership import Judge, Ownership
from edgeq.util.record_files import read_json
from edgeq.util.records import plain


def require_program(program: str, fix: str) -> str:
    """Return the path of a program.

    Args:
        fix: how to install the program, for the error.

    Raises:
        RuntimeUnavailableError: the program is not installed.
    """
    path = find_program(program)
    if path is None:
        raise RuntimeUnavailableError(f"{program} is not installed", fix)
    return path


def run(command: Sequence[str], fix: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command that must succeed, and return its standard output. The command's messages are in English.

    Args:
        fix: the solution to name in the error.

    Raises:
        RuntimeUnavailableError: the command failed. The error contains one line of the command's messages.
    """
    process = subprocess.run(
        command,
        cwd=cwd,
        # The texts are searched for "E:" and "error" below, so they must not be translated.
        env={**build_child_environment(), "LC_ALL": "C", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if process.returncode != 0:
        output = [line.strip() for line in (process.stderr or process.stdout).splitlines() if line.strip()]
        # apt and pip mark their errors. Other programs have the reason in their last line.
        errors = [line for line in output if line.startswith(("E:", "ERROR", "error"))] or output[-1:]
        raise RuntimeUnavailableError(
            f"{Path(command[0]).name} failed: {errors[0] if errors else f'exit code {process.returncode}'}", fix
        )
    return process.stdout


# edgeq can run apt without root, with a state of its own. It knows no other package manager.
_WITHOUT_APT = "On a system without apt, unpack a root file system yourself and name it with ⟨sysroot⟩"
_ONLINE = "Check the network and the system's package sources, or name a root file system with ⟨sysroot⟩"


@dataclass(frozen=True)
class Package:
    """Describe one package, as listed in the signed index."""

    name: str
    version: str
    sha256: str
    size: int
    depends: str

    @property
    def label(self) -> str:
        """Return "name=version", the form that apt accepts."""
        return f"{self.name}={self.version}"


@dataclass(frozen=True)
class Archive:
    """Describe one component of one release on one server.

    Attributes:
        keys: the file with the keys whose signatures are valid; "" means all known keys.
    """

    site: str
    release: str
    component: str
    keys: str

    def line(self, release: str) -> str:
        """Return a line of a sources file for another release in the same archive."""
        signed = f"[signed-by={self.keys}] " if self.keys else ""
        return f"deb {signed}{self.site} {release} {self.component}"


@dataclass(frozen=True)
class Apt:
    """Run a private apt.

    Attributes:
        state: the folder for apt's state.
        architecture: architecture of the packages, in the distribution's spelling; "" means the system's own.
        sources: a sources file to use instead of the system's.
    """

    state: Path
    architecture: str = ""
    sources: Path | None = None

    @property
    def _options(self) -> tuple[str, ...]:
        state = self.state
        # Every path that apt would write is below `state`, so apt needs no root and changes nothing on the system.
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
            # "-" for the folder means that no other sources are read.
            options |= {"Dir::Etc::sourcelist": self.sources, "Dir::Etc::sourceparts": "-"}
        return tuple(part for key, value in options.items() for part in ("-o", f"{key}={value}"))

    def update(self) -> None:
        """Fetch the package lists.

        Raises:
            RuntimeUnavailableError: apt is missing, or its sources cannot be reached.
        """
        for folder in ("lists/partial", "archives/partial"):
            (self.state / folder).mkdir(parents=True, exist_ok=True)
        # apt needs a status file. An empty one says that nothing is installed.
        (self.state / "status").touch()
        self._apt("apt-get", "update", "-qq", "-o", "APT::Update::Error-Mode=any")

    def offers(self, names: Sequence[str]) -> dict[str, list[Package]]:
        """Return every version of each package in the index, the newest first. Unknown names are left out."""
        # `apt-cache show` fails if one of its names is unknown, so unknown names are dropped first.
        listed = set(self._apt("apt-cache", "policy", *names).splitlines())
        listed_names = [name for name in names if f"{name}:" in listed]
        offers: dict[str, list[Package]] = {}
        for text in self._apt("apt-cache", "show", *listed_names).split("\n\n") if listed_names else ():
            fields = Parser().parsestr(text)
            if fields["Package"] in listed_names and fields["SHA256"]:
                # Some packages list their interpreter only among the pre-dependencies.
                depends = ", ".join(filter(None, (fields["Pre-Depends"], fields["Depends"])))
                package = Package(fields["Package"], fields["Version"], fields["SHA256"], int(fields["Size"]), depends)
                offers.setdefault(package.name, []).append(package)
        return offers

    def download(self, packages: Sequence[Package], folder: Path) -> list[Path]:
        """Fetch packages that are not in `folder` yet, and check their hashes against the index.

        Raises:
            RuntimeUnavailableError: a package cannot be fetched, or does not match the index.
        """
        places = {package: folder / f"{package.name}.deb" for package in packages}
        # A package of an interrupted run is kept only if its hash is right.
        missing = [p for p, place in places.items() if not place.is_file() or sha256(place) != p.sha256]
        with tempfile.TemporaryDirectory(dir=folder, prefix="fetching-") as work:
            if missing:
                self._apt("apt-get", "download", "-qq", *(package.label for package in missing), cwd=Path(work))
            # apt names the files by version and architecture in a spelling of its own, so they are found by their hash.
            fetched = {sha256(file): file for file in Path(work).glob("*.deb")}
            for package in missing:
                if package.sha256 not in fetched:
                    raise RuntimeUnavailableError(f"{package.label} does not match the package index", _ONLINE)
                fetched[package.sha256].replace(places[package])
        return list(places.values())

    def archives(self) -> list[Archive]:
        """Return the archives that the package lists came from."""
        form = "$(SITE)\t$(RELEASE)\t$(COMPONENT)\t$(SOURCESENTRY)"
        output = self._apt("apt-get", "indextargets", "--format", form, "Created-By: Packages")
        lines = [line.split("\t") for line in dict.fromkeys(output.splitlines())]
        return [Archive(site, release, component, _find_keys(entry)) for site, release, component, entry in lines]

    def _apt(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        return run([require_program(program, _WITHOUT_APT), *self._options, *arguments], _ONLINE, cwd=cwd)


def _find_keys(entry: str) -> str:
    """Return the key file that an entry of a sources file names.

    Args:
        entry: the entry's position as "FILE:LINE".
    """
    file = Path(entry.rpartition(":")[0])
    # Both forms of sources files are searched: one line an entry, and deb822.
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    match = re.search(r"signed-by\s*[:=]\s*(/[^\s\],]+)", text, re.IGNORECASE)
    return match.group(1) if match else ""


def unpack(deb: Path, folder: Path) -> None:
    """Unpack a package without running its scripts.

    Raises:
        RuntimeUnavailableError: dpkg-deb is missing, or the package is damaged.
    """
    run([require_program("dpkg-deb", _WITHOUT_APT), "-x", str(deb), str(folder)], f"Remove {deb} and run again")


def unpack_programs(deb: Path, folder: Path, names: Collection[str]) -> list[Path]:
    """Extract the plain files with these names from a package into `folder`, whatever their path in the package.
    Extract nothing else.

    Raises:
        RuntimeUnavailableError: dpkg-deb is missing, or the package is damaged.
    """
    command = [require_program("dpkg-deb", _WITHOUT_APT), "--fsys-tarfile", str(deb)]
    programs = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=build_child_environment()
    ) as process:
        assert process.stdout is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                for member in tar:
                    name = PurePosixPath(member.name).name
                    # A link or a device with that name could lead outside the folder.
                    source = tar.extractfile(member) if name in names and member.isfile() else None
                    if source is not None:
                        place = folder / name
                        with place.open("wb") as sink:
                            shutil.copyfileobj(source, sink, 1 << 20)
                        place.chmod(0o755)
                        programs.append(place)
        except (tarfile.TarError, EOFError) as error:
            raise RuntimeUnavailableError(f"{deb} cannot be unpacked", "Remove it and run again") from error
    return programs


_FIX = "Check the network and pip's configuration (pip config list)"


def download_wheels(
    projects: Mapping[str, str], python: str, platforms: Sequence[str], pins: Mapping[str, str], folder: Path
) -> list[Path]:
    """Fetch the wheel of each project for another machine. Wheels that are already in `folder` are not fetched again.

    Args:
        projects: version of each project, by name. "" means the newest version that `pins` lists for that Python or, if
            `pins` lists none, the newest of all.
        python: the other machine's Python version, such as "3.11".
        platforms: acceptable wheel platform tags.
        pins: SHA-256 of wheels, by file name; a pinned wheel must match.

    Raises:
        RuntimeUnavailableError: pip is missing, there is no such wheel, or a wheel does not match its pin.
    """
    pip = _find_pip()
    folder.mkdir(parents=True, exist_ok=True)
    tag = f"cp{python.replace('.', '')}"
    lines = []
    for name, version in projects.items():
        pinned = {file: digest for file, digest in pins.items() if f"-{tag}-" in file and file.startswith(f"{name}-")}
        # A pin counts only for the requested version. Another version is then not pinned, and the notes say so.
        fitting = {file: d for file, d in pinned.items() if version in ("", file.split("-")[1])}
        exact_version = version or (max(fitting).split("-")[1] if fitting else "")
        hashes = "".join(f" --hash=sha256:{digest}" for digest in fitting.values())
        # A requirement with a hash makes pip refuse every other file.
        lines.append(f"{name}=={exact_version}{hashes}" if exact_version else name)
    for line in lines:
        _download(pip, line, tag, python, platforms, folder)
    wheels = sorted(folder.glob("*.whl"))
    # pip keeps files of earlier runs, so all of them are checked, not only the new ones.
    for wheel in wheels:
        if pins.get(wheel.name, sha256(wheel)) != sha256(wheel):
            raise RuntimeUnavailableError(f"{wheel.name} is not the one that edgeq was tested with", f"Remove {wheel}")
    return wheels


def _find_pip() -> Path:
    """Return the folder of this Python's pip."""
    spec = importlib.util.find_spec("pip")
    if spec is None or spec.origin is None:
        raise RuntimeUnavailableError(
            f"{sys.executable} has no pip", "Install it: python -m ensurepip, or name a root file system with ⟨sysroot⟩"
        )
    return Path(spec.origin).resolve().parent


def _download(pip: Path, line: str, tag: str, python: str, platforms: Sequence[str], folder: Path) -> None:
    """Download the wheel of one project. Each project needs a call of its own, because pip accepts hashes only if all
    projects of a call have them.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(line + "\n", encoding="utf-8")
    # Run pip by its folder, in isolated mode. With -m, Python would search the working directory first.
    command = [sys.executable, "-I", str(pip), "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--abi", tag]
    command += [part for platform in platforms for part in ("--platform", platform)]
    run([*command, "--dest", str(folder), "--requirement", str(requirements)], _FIX)
    requirements.unlink()


LOCK = "lock.json"
_KIND = "emulator"
_WORK = ("apt", "packages", "wheels", "root")
_PYTHON = re.compile(r"python3\.(\d+)")
# The folders that are searched for an interpreter, in this order.
_ROOTS = ("usr/bin", "usr/local/bin", "bin", "opt/python/bin")


@dataclass(frozen=True)
class LockedPackage:
    """Record an unpacked package of the distribution."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class LockedWheel:
    """Record an unpacked wheel. `name` is its file name."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Lock:
    """Record the contents of a root file system. `bytes` is its size, or None if the user provided the file system."""

    root: Path
    packages: tuple[LockedPackage, ...] = ()
    wheels: tuple[LockedWheel, ...] = ()
    notes: tuple[str, ...] = ()
    bytes: int | None = None


@dataclass(frozen=True)
class Sysroot:
    """Describe a root file system that is ready.

    Attributes:
        root: its directory.
        python: the interpreter in it, as a path on this machine.
        site: the folder with numpy and onnxruntime; None if the interpreter finds them by itself.
        lock: the record of its contents.
    """

    root: Path
    python: Path
    site: Path | None
    lock: Lock

    def has_wheel(self, project: str) -> bool:
        """Return whether it contains the wheel of `project`. What a user's own file system contains is not known, and
        the result is then True.
        """
        names = [wheel.name.split("-")[0] for wheel in self.lock.wheels]
        return not names or project.replace("-", "_") in names


def place_of(emulator: Emulator) -> Path:
    """Return the folder of the root file system that `setup` makes for `emulator`."""
    return home() / emulator.name


def load_sysroot(emulator: Emulator) -> Sysroot | None:
    """Return the root file system that was set up for `emulator`; None if none was set up."""
    lock = check_place(place_of(emulator), f"edgeq emulate setup {emulator.name}") / LOCK
    if not lock.is_file():
        return None
    try:
        return _open_sysroot(emulator, read_json(lock, Lock, UsageError, ""))
    except UsageError as error:
        raise RuntimeUnavailableError(
            f"{lock.parent} is damaged ({error.problem})", f"Remove it and run: edgeq emulate setup {emulator.name}"
        ) from error


def use_sysroot(emulator: Emulator, root: Path) -> Sysroot:
    """Use an existing root file system without changing it.

    Raises:
        UsageError: the file system has no Python for that architecture.
    """
    lock = Lock(root.resolve(), notes=(as_options("provided with ⟨sysroot⟩"),))
    ready = _open_sysroot(emulator, lock)
    place = place_of(emulator)
    # Only a folder that edgeq made is written to. Anything else may be the user's.
    SYSROOT.check(place)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_marker(place, _KIND)
    _write(lock, place)
    return ready


def build_sysroot(
    emulator: Emulator,
    onnxruntime: str,
    *,
    sources: Path | None = None,
    progress: Progress = SILENT,
) -> Sysroot:
    """Make the root file system from packages and wheels. Files that an interrupted run has already fetched are not
    fetched again.

    Args:
        onnxruntime: the version to install.
        sources: an apt sources file to use instead of the system's.

    Raises:
        RuntimeUnavailableError: apt, dpkg-deb or pip is missing, or something cannot be fetched.
    """
    recipe, pins = emulator.sysroot, emulator.pins
    assert recipe is not None, "an emulator without a recipe runs the host's own files"
    place = place_of(emulator)
    # The file system grows under another name, so an interrupted run is never taken for a complete one.
    work = place.with_name(f"{place.name}.partial")
    SYSROOT.check(place)
    SYSROOT.check(work)
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_marker(work, _KIND)
    # The folder may be older than this run, and its programs will run with the user's rights.
    check_place(work, f"edgeq emulate setup {emulator.name}")
    debs = work / "packages"
    debs.mkdir(parents=True, exist_ok=True)
    apt = Apt(work / "apt", emulator.architecture, sources)
    with progress.stage(f"Reading the package lists for {emulator.name}"):
        apt.update()
        python, packages, notes = _choose(apt, recipe, emulator)
    with progress.stage(f"Fetching {len(packages)} packages"):
        files = apt.download(packages, debs)
    with progress.stage("Fetching wheels"):
        versions = {name: onnxruntime if name == "onnxruntime" else "" for name in recipe.wheels}
        wheels = download_wheels(versions, python, recipe.wheel_platforms, pins.wheels, work / "wheels")
    root = work / "root"
    # Files of an interrupted unpacking may be cut off. Downloads are kept, because their hashes are checked.
    shutil.rmtree(root, ignore_errors=True)
    with progress.stage("Unpacking", len(files) + len(wheels)) as advance:
        for file in files:
            unpack(file, root)
            advance(1)
        # Packages are pruned before the wheels are added, which leave out their files one by one.
        _prune(root, recipe)
        for wheel in wheels:
            _unpack_wheel(wheel, root / "site", recipe)
            advance(1)
        # The links come last, because a package may still bring the folder itself.
        _join_usr(root)
    notes += [f"{w.name} is not pinned: its hash is recorded as fetched" for w in wheels if w.name not in pins.wheels]
    lock = Lock(
        place / "root",
        tuple(LockedPackage(p.name, p.version, p.sha256) for p in packages),
        tuple(LockedWheel(wheel.name, sha256(wheel)) for wheel in wheels),
        tuple(notes),
        _count_bytes(root),
    )
    _write(lock, work)
    # The downloads are needed only for a repeated run, and they double the size.
    for folder in ("apt", "packages", "wheels"):
        shutil.rmtree(work / folder)
    # Fetching takes a while, and the folder may have changed meanwhile.
    SYSROOT.check(place)
    if place.exists():
        shutil.rmtree(place)
    work.rename(place)
    return _open_sysroot(emulator, lock)


def _judge(folder: Path) -> Judge | None:
    # Early versions wrote no marker, and their lock file is the only sign.
    if not is_marker(folder, _KIND) and not _is_lock(folder / LOCK) and not folder.name.endswith(".partial"):
        return None
    return lambda name: name in (MARKER, LOCK) or name.rstrip("/") in _WORK


def _is_lock(path: Path) -> bool:
    lock = read_object(path)
    return lock is not None and {"root", "packages", "wheels", "notes"} <= lock.keys()


SYSROOT = Ownership("root file system that edgeq made", _judge, frozenset(_WORK))
"""The folder has a marker or, if an early version made it, a lock file. It contains only files that `setup` makes."""


def _choose(apt: Apt, recipe: Recipe, emulator: Emulator) -> tuple[str, list[Package], list[str]]:
    """Return the version of Python ("3.11"), the packages to unpack, and notes about them."""
    pins = emulator.pins.packages
    interpreter = apt.offers([recipe.interpreter]).get(recipe.interpreter)
    # The distribution's default Python decides, because its version is part of the names of other packages.
    depends = re.search(r"\bpython(3\.\d+)-minimal", interpreter[0].depends) if interpreter else None
    if depends is None:
        raise RuntimeUnavailableError(
            f"the system's package sources offer no {emulator.name} packages",
            "Name other sources with ⟨sources⟩ FILE, or a root file system with ⟨sysroot⟩",
        )
    version = depends.group(1)
    choices = [*recipe.packages, *(name.format(python=f"python{version}") for name in recipe.python_packages)]
    names = [name for choice in choices for name in choice.split("|")]
    offers = apt.offers(names)
    packages, notes = [], []
    for choice in choices:
        name = next((name for name in choice.split("|") if name in offers), None)
        if name is None:
            raise RuntimeUnavailableError(
                f"the system's package sources offer no {choice.replace('|', ' or ')} for {emulator.name}",
                "Name other sources with ⟨sources⟩ FILE, or a root file system with ⟨sysroot⟩",
            )
        # A pinned version comes before a newer one, because edgeq was tested with it.
        package = next((p for p in offers[name] if p.label in pins), offers[name][0])
        pin = pins.get(package.label)
        if pin is None:
            notes.append(f"{package.label} is not pinned: checked only against the signed index")
        elif pin != package.sha256:
            raise RuntimeUnavailableError(
                f"{package.label} in the index is not the one that edgeq was tested with",
                "Check the package sources, or name a root file system with ⟨sysroot⟩",
            )
        packages.append(package)
    return version, packages, notes


def _prune(root: Path, recipe: Recipe) -> None:
    # In this order, a folder comes after everything in it, so it may be empty by then.
    for path in sorted(root.rglob("*"), reverse=True):
        name = path.relative_to(root).as_posix()
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif recipe.leaves_out(name):
            path.unlink()


def _unpack_wheel(wheel: Path, site: Path, recipe: Recipe) -> None:
    """Unpack a wheel. zipfile writes no member outside `site`."""
    with zipfile.ZipFile(wheel) as archive:
        # The recipe names files by their place in the root file system, and wheels go to its folder site/.
        names = [n for n in archive.namelist() if not n.endswith("/") and not recipe.leaves_out(f"site/{n}")]
        archive.extractall(site, names)


def _join_usr(root: Path) -> None:
    """Link lib, bin and lib64 to their folders in /usr.

    Distributions that keep everything in /usr have these links in a package that the recipe leaves out.
    """
    for name in ("lib", "bin", "lib64"):
        if not (root / name).exists() and (root / "usr" / name).is_dir():
            (root / name).symlink_to(f"usr/{name}")


def _write(lock: Lock, folder: Path) -> None:
    (folder / LOCK).write_text(json.dumps(plain(lock), indent=2) + "\n", encoding="utf-8")


def _open_sysroot(emulator: Emulator, lock: Lock) -> Sysroot:
    root = lock.root
    python = next(iter(_find_interpreters(root, emulator)), None)
    if python is None:
        raise UsageError(f"{root} has no Python for {emulator.name}", "Name a root file system that has one")
    site = root / "site"
    return Sysroot(root, python, site if site.is_dir() else None, lock)


def _find_interpreters(root: Path, emulator: Emulator) -> Iterable[Path]:
    for folder in _ROOTS:
        if (root / folder).is_dir():
            interpreters = [
                p for p in (root / folder).iterdir() if _PYTHON.fullmatch(p.name) and _is_program(p, emulator)
            ]
            # The newest first. By number, because "python3.9" sorts after "python3.11" as text.
            yield from sorted(interpreters, key=lambda p: int(p.name.split(".")[1]), reverse=True)


def _is_program(path: Path, emulator: Emulator) -> bool:
    """Return whether a file is a 64-bit ELF program of the emulator's architecture."""
    if not path.is_file():
        return False
    with open_file(path) as stream:
        # The first 20 bytes of an ELF file contain its class and its architecture.
        head = stream.read(20)
    return head[:5] == b"\x7fELF\x02" and len(head) == 20 and struct.unpack("<H", head[18:])[0] == emulator.elf_machine


def _count_bytes(folder: Path) -> int:
    # A link takes no space of its own, and its target may be counted already.
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
