"""A bundle's directory that is changed between the hashes and the session is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from edgeq_device import opening, sessions
from edgeq_device.cli import main
from edgeq_device.errors import BundleError
from edgeq_device.package import open_bundle

from edgeq.bundle.write import BundleSpec, write_bundle

from .samples import linear, variant


def model(root: Path) -> Path:
    return next(root.glob("models/model/plain/*.onnx"))


def replace(root: Path) -> None:
    """Another file of the same size under the same name."""
    shutil.copy2(model(root), root.parent / "other")
    os.replace(root.parent / "other", model(root))


def rewrite(root: Path) -> None:
    """Other bytes in the file, its size and the time of its content as they were."""
    times = model(root).stat()
    content = bytearray(model(root).read_bytes())
    content[-1] ^= 1
    model(root).write_bytes(content)
    os.utime(model(root), ns=(times.st_atime_ns, times.st_mtime_ns))


def swap(root: Path) -> None:
    """Another bundle in its place."""
    root.rename(root.parent / "old")
    shutil.copytree(root.parent / "old", root)


def swap_inside_and_back(root: Path) -> None:
    """The folder of the models moved away and back, as after onnxruntime has read others."""
    (root / "models").rename(root.parent / "away")
    (root.parent / "away").rename(root / "models")


def remove(root: Path) -> None:
    model(root).unlink()


CHANGES = [replace, rewrite, swap, swap_inside_and_back, remove]


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
    opens = sessions._open_files

    def changed(one: object, *arguments: object) -> object:
        monkeypatch.setattr(sessions, "_open_files", opens)
        session = opens(one, *arguments)  # type: ignore[arg-type]
        change(copy)
        return session

    monkeypatch.setattr(sessions, "_open_files", changed)
    assert main([*command, "--bundle", str(copy)]) != 0
    said = capsys.readouterr()
    assert "since it was hashed" in said.out + said.err


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_directory_that_changes_before_it_is_opened(change: Callable[[Path], None], copy: Path) -> None:
    bundle = open_bundle(copy)
    variants = {one.name: one for one in bundle.components["model"]}
    opening.open_variant(variants["plain"])
    change(copy)
    with pytest.raises((BundleError, opening.RuntimeUnavailableError)):
        opening.open_variant(variants["plain"])


def test_outputs_beside_the_files_of_a_bundle_do_no_harm(copy: Path) -> None:
    """A directory that people work in: what they put at its top is no change of the bundle."""
    bundle = open_bundle(copy)
    (copy / "notes.txt").write_text("mine")
    variants = {one.name: one for one in bundle.components["model"]}
    opening.open_variant(variants["plain"])


def test_links_that_an_older_onnxruntime_needs_are_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    external = linear(tmp_path / "m" / "m.onnx", 0.0, external="weights.bin")
    write_bundle(BundleSpec("linear", (variant("v", external, 0.0),)), tmp_path / "bundle")
    monkeypatch.setattr(sessions, "_FOLDER_FROM_BYTES", (99, 0))
    bundle = open_bundle(tmp_path / "bundle")
    for _ in range(2):
        opening.open_variant(bundle.components["model"][0])
