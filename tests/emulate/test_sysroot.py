"""Make a root file system offline, from a distribution and an index of a few files that the tests create."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from edgeq.emulate.emulator import Emulator, Pins, find_emulator
from edgeq.emulate.sysroot import LOCK, Apt, Package, build_sysroot, load_sysroot, place_of, use_sysroot
from edgeq.errors import OutputError, RuntimeUnavailableError, UsageError

ELF = b"\x7fELF\x02\x01\x01" + bytes(11) + (183).to_bytes(2, "little") + bytes(40)
CONTENTS = {
    "libc6": {"lib/ld-linux-aarch64.so.1": ELF, "usr/share/doc/libc6/copyright": b"left out"},
    "libssl3": {"usr/lib/libssl.so.3": ELF},
    "python3-minimal": {"usr/bin/python3": b""},
    "python3.11-minimal": {"usr/bin/python3.11": ELF},
    "libpython3.11-stdlib": {"usr/lib/python3.11/json/__init__.py": b"", "usr/lib/python3.11/test/big.py": b""},
}

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("apt-get", "apt-cache", "dpkg-deb"))), reason="apt and dpkg-deb are not here"
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Write a sources file that names a repository of arm64 packages in this file system."""
    repository = tmp_path / "repository"
    repository.mkdir()
    stanzas = []
    for name, files in CONTENTS.items():
        tree = tmp_path / "trees" / name
        depends = "Depends: python3.11-minimal (>= 3.11.2)\n" if name == "python3-minimal" else ""
        control = f"Package: {name}\nVersion: 1.0-1\nArchitecture: arm64\nMaintainer: nobody\n{depends}Description: x\n"
        for file, content in {**files, "DEBIAN/control": control.encode()}.items():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            (tree / file).write_bytes(content)
        deb = repository / f"{name}.deb"
        subprocess.run(["dpkg-deb", "--root-owner-group", "-b", str(tree), str(deb)], check=True, capture_output=True)
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        stanzas.append(f"{control}Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n")
    (repository / "Packages").write_text("\n".join(stanzas))
    file = tmp_path / "some.list"
    file.write_text(f"deb [trusted=yes] file:{repository} ./\n")
    return file


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder of wheels for that machine, which pip uses in place of an index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, version in (("ncnn", "1.0"), ("numpy", "2.0.0"), ("onnxruntime", "1.30.0")):
        wheel = folder / f"{name}-{version}-cp311-cp311-manylinux2014_aarch64.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}/__init__.py", f"__version__ = {version!r}\n")
            archive.writestr(f"{name}/tests/__init__.py", "")
            archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
            archive.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
            archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def small() -> Emulator:
    """Return the ARM64 machine with fewer packages and without pins."""
    emulator = find_emulator("arm64")
    assert emulator.sysroot is not None
    recipe = replace(
        emulator.sysroot,
        packages=("libc6", "libssl3t64|libssl3"),
        python_packages=("{python}-minimal", "lib{python}-stdlib"),
    )
    return replace(emulator, sysroot=recipe, pins=Pins())


def pinned(emulator: Emulator, **pins: dict[str, str]) -> Emulator:
    return replace(emulator, pins=replace(emulator.pins, **pins))


def test_it_is_made_of_packages_and_wheels(own_home: Path, sources: Path, index: Path, small: Emulator) -> None:
    made = build_sysroot(small, "1.30.0", sources=sources)
    root = own_home / "arm64" / "root"
    assert made.python == root / "usr/bin/python3.11"
    assert made.site == root / "site"
    files = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    assert {"lib/ld-linux-aarch64.so.1", "usr/lib/libssl.so.3", "usr/lib/python3.11/json/__init__.py"} <= files
    assert {"site/numpy/__init__.py", "site/onnxruntime/__init__.py"} <= files
    assert not {f for f in files if "/test" in f or "/doc/" in f}
    assert [(p.name, p.version) for p in made.lock.packages][:2] == [("libc6", "1.0-1"), ("libssl3", "1.0-1")]
    assert len(made.lock.notes) == 7
    assert "numpy-2.0.0-cp311-cp311-manylinux2014_aarch64.whl is not pinned" in made.lock.notes[-2]
    assert load_sysroot(small) == made
    assert [entry.name for entry in own_home.iterdir()] == ["arm64"]


def test_pins_hold(own_home: Path, sources: Path, index: Path, small: Emulator) -> None:
    digest = hashlib.sha256((sources.parent / "repository" / "libc6.deb").read_bytes()).hexdigest()
    wheel = next(index.glob("numpy*"))
    good = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest()}
    exact = pinned(small, packages={"libc6=1.0-1": digest}, wheels=good)
    notes = build_sysroot(exact, "1.30.0", sources=sources).lock.notes
    assert not [note for note in notes if "libc6=" in note or "numpy-" in note]
    other = pinned(small, packages={"libc6=1.0-1": "0" * 64})
    with pytest.raises(RuntimeUnavailableError, match=r"libc6=1.0-1 in the index is not the one"):
        build_sysroot(other, "1.30.0", sources=sources)
    changed = pinned(small, wheels=dict.fromkeys(good, "0" * 64))
    with pytest.raises(RuntimeUnavailableError, match=r"pip failed|python\S* failed|hash"):
        build_sysroot(changed, "1.30.0", sources=sources)


def test_fetched_packages_are_not_fetched_again(own_home: Path, sources: Path, index: Path, small: Emulator) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"onnxruntime==9\.9\.9"):
        build_sysroot(small, "9.9.9", sources=sources)
    kept = own_home / "arm64.partial" / "packages"
    assert len(list(kept.glob("*.deb"))) == 4
    for deb in (sources.parent / "repository").glob("*.deb"):
        deb.unlink()
    assert build_sysroot(small, "1.30.0", sources=sources).python.is_file()
    assert not kept.exists()


def test_setup_keeps_files_that_it_did_not_make(own_home: Path, sources: Path, index: Path, small: Emulator) -> None:
    build_sysroot(small, "1.30.0", sources=sources)
    build_sysroot(small, "1.30.0", sources=sources)
    for place in ("arm64", "arm64.partial"):
        notes = own_home / place / "notes.txt"
        notes.parent.mkdir(exist_ok=True)
        notes.write_text("mine")
        with pytest.raises(OutputError, match=rf"{place} contains notes\.txt, which edgeq did not write"):
            build_sysroot(small, "1.30.0", sources=sources)
        assert notes.read_text() == "mine"
        assert load_sysroot(small) is not None
        notes.unlink()


def test_sources_without_such_packages(own_home: Path, sources: Path, small: Emulator) -> None:
    sources.write_text("")
    with pytest.raises(RuntimeUnavailableError, match=r"offer no arm64 packages.*`sysroot`"):
        build_sysroot(small, "1.30.0", sources=sources)


def test_a_package_that_is_not_what_the_index_promised(tmp_path: Path, sources: Path) -> None:
    apt = Apt(tmp_path / "apt", "arm64", sources)
    apt.update()
    (offer,) = apt.offers(["libc6", "no-such-package"])["libc6"]
    false = Package(offer.name, offer.version, "0" * 64, offer.size, offer.depends)
    with pytest.raises(RuntimeUnavailableError, match=r"libc6=1.0-1 does not match the package index"):
        apt.download([false], tmp_path)
    assert not list(tmp_path.glob("*.deb"))


def test_one_that_exists_is_taken_as_it_is(own_home: Path, tmp_path: Path, small: Emulator) -> None:
    root = tmp_path / "container"
    (root / "usr/bin").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"has no Python for arm64"):
        use_sysroot(small, root)
    shutil.copy(sys.executable, root / "usr/bin/python3.12")
    (root / "usr/bin/python3.9").write_bytes(ELF)
    (root / "usr/bin/python3.11").write_bytes(ELF)
    found = use_sysroot(small, root)
    assert (found.python, found.site) == (root / "usr/bin/python3.11", None)
    assert load_sysroot(small) == found
    lock = place_of(small) / LOCK
    for damaged in ("[" * 100_000, json.dumps({"root": str(root), "packages": [], "wheels": 3, "notes": []})):
        whole, _ = lock.read_text(), lock.write_text(damaged)
        with pytest.raises(RuntimeUnavailableError, match=r"is damaged.*edgeq emulate setup arm64"):
            load_sysroot(small)
        lock.write_text(whole)
    shutil.rmtree(root)
    with pytest.raises(RuntimeUnavailableError, match=r"is damaged.*edgeq emulate setup arm64"):
        load_sysroot(small)


def test_without_apt_it_says_what_to_do(
    own_home: Path, sources: Path, small: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeUnavailableError, match=r"apt-get is not installed.*`sysroot`"):
        build_sysroot(small, "1.30.0", sources=sources)
