"""The files of a bundle's directory that run are those that were hashed. They run from a copy. If they are opened in
place, edgeq refuses them after any change that it can detect.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from edgeq_device.bundle import manifest, opening, package
from edgeq_device.bundle.package import open_bundle
from edgeq_device.bundle.verify import verify
from edgeq_device.cli import main
from edgeq_device.engines.sessions import read_device
from edgeq_device.errors import BundleError, OutputError

from edgeq.bundle.plan import BundleSpec
from edgeq.bundle.write import write_bundle

from .samples import HERE, linear, variant


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every directory too large to copy."""
    monkeypatch.setattr(package, "COPIED", 0)


def model(root: Path) -> Path:
    return next(root.glob("models/model/plain/*.onnx"))


def replace(root: Path) -> None:
    """Replace the file with another one of the same name and size."""
    shutil.copy2(model(root), root.parent / "other")
    os.replace(root.parent / "other", model(root))


def rewrite(root: Path) -> None:
    """Change bytes in the file but keep its size and its modification time."""
    times = model(root).stat()
    content = bytearray(model(root).read_bytes())
    content[-1] ^= 1
    model(root).write_bytes(content)
    os.utime(model(root), ns=(times.st_atime_ns, times.st_mtime_ns))


def swap(root: Path) -> None:
    """Replace the bundle with a copy of it."""
    root.rename(root.parent / "old")
    shutil.copytree(root.parent / "old", root)


def swap_inside_and_back(root: Path) -> None:
    """Move the folder of the models away and back, as an attacker does after onnxruntime has read other files."""
    (root / "models").rename(root.parent / "away")
    (root.parent / "away").rename(root / "models")


def remove(root: Path) -> None:
    model(root).unlink()


CHANGES = [replace, rewrite, swap, swap_inside_and_back, remove]


def between_hash_and_open(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """Call `before` and `after` around the opening of the first session."""
    opens = onnxruntime.InferenceSession

    def changed(*arguments: object, **options: object) -> object:
        monkeypatch.setattr(onnxruntime, "InferenceSession", opens)
        before()
        session = opens(*arguments, **options)
        after()
        return session

    monkeypatch.setattr(onnxruntime, "InferenceSession", changed)


@pytest.mark.parametrize("change", ["rewrite", "root"])
def test_runs_the_hashed_model_even_if_the_file_is_replaced(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hashed model runs, even if a model of the same size and times replaces it while onnxruntime reads."""
    places = {}
    for name, bias in (("good", 0.0), ("evil", 7.0)):
        one = variant("plain", linear(tmp_path / name / "m.onnx", bias), 0.0, info={"architecture": HERE})
        write_bundle(BundleSpec("linear", (one,)), places.setdefault(name, tmp_path / f"{name}.bundle"))
    good, evil = (model(place) for place in places.values())
    content, times = good.read_bytes(), good.stat()
    assert len(content) == evil.stat().st_size

    def write(data: bytes) -> None:
        good.write_bytes(data)
        os.utime(good, ns=(times.st_atime_ns, times.st_mtime_ns))

    def swap_in() -> None:
        places["good"].rename(tmp_path / "away")
        places["evil"].rename(places["good"])

    def swap_back() -> None:
        places["good"].rename(places["evil"])
        (tmp_path / "away").rename(places["good"])

    meanwhile = {"rewrite": (lambda: write(evil.read_bytes()), lambda: write(content)), "root": (swap_in, swap_back)}
    between_hash_and_open(monkeypatch, *meanwhile[change])
    with open_bundle(places["good"]) as bundle:
        report = verify(bundle, read_device())
        assert report.passed
        assert report.to_dict()["opened"] == "copy"
        folder = bundle.root
        assert folder != bundle.source
        assert os.name != "posix" or folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


@pytest.mark.parametrize("why", ["large", "full", "no temporary folder", "quota"])
def test_a_directory_without_space_for_a_copy_is_opened_in_place(
    why: str, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise OutputError("no space")

    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    size = sum(file.stat().st_size for file in copy.rglob("*") if file.is_file())
    if why == "large":
        monkeypatch.setattr(package, "COPIED", size // 2)
    elif why == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(2 * size, 0, 2 * size))
    elif why == "no temporary folder":
        monkeypatch.setattr(package, "temporary_folder", refuse)
    else:
        monkeypatch.setattr(manifest, "_sink", full_of(manifest._sink))
    assert main(["verify", "--bundle", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["opened"] == "in place"
    assert main(["verify", "--bundle", str(copy)]) == 0
    assert "opened in place" in capsys.readouterr().out
    assert list((tmp_path / "scratch").iterdir()) == []


def full_of(sink: Callable[[Path | None, str], Any]) -> Callable[[Path | None, str], Any]:
    """Return `_sink` as on a disk without space for the user's files."""

    def fails(to: Path | None, name: str) -> Any:
        if to is not None:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return sink(to, name)

    return fails


@pytest.mark.skipif(os.name != "posix", reason="a signal")
def test_a_copy_is_removed_when_the_runner_is_ended(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, str(copy / "edgeq_run.py"), "bench", "--duration", "60"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not list((tmp_path / "scratch").glob("edgeq-bundle-*/models")) and time.monotonic() < until:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 143
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.usefixtures("in_place")
@pytest.mark.skipif(os.name != "posix", reason="the times and numbers of files as POSIX has them")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("command", [("verify",), ("infer", "x.npz"), ("bench", "--duration", "0.01")], ids=" ".join)
def test_a_directory_that_changes_while_it_is_opened(
    command: tuple[str, ...],
    change: Callable[[Path], None],
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    between_hash_and_open(monkeypatch, lambda: None, lambda: change(copy))
    assert main([*command, "--bundle", str(copy)]) != 0
    said = capsys.readouterr()
    assert "since it was hashed" in said.out + said.err


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_directory_that_changes_before_it_is_opened(change: Callable[[Path], None], copy: Path) -> None:
    bundle = open_bundle(copy)
    variants = {one.name: one for one in bundle.components["model"]}
    opening.open_variant(variants["plain"])
    change(copy)
    with pytest.raises((BundleError, opening.RuntimeUnavailableError)):
        opening.open_variant(variants["plain"])


@pytest.mark.usefixtures("in_place")
def test_outputs_beside_the_files_of_a_bundle_do_no_harm(copy: Path) -> None:
    """Files that people put at the top of a bundle's directory do not count as changes of the bundle."""
    bundle = open_bundle(copy)
    (copy / "notes.txt").write_text("mine")
    variants = {one.name: one for one in bundle.components["model"]}
    opening.open_variant(variants["plain"])
