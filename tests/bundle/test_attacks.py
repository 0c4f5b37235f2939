"""Every hostile or damaged bundle is refused with its reason before anything in it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from edgeq_device.bundle.package import open_bundle
from edgeq_device.errors import BundleError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .attacks import archives, directories
from .samples import tree


@pytest.mark.parametrize("name", directories.ATTACKS)
def test_directory_is_refused(name: str, copy: Path) -> None:
    attack, says = directories.ATTACKS[name]
    if name == "pipe" and not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    attack(copy)
    with pytest.raises(BundleError) as refusal:
        open_bundle(copy)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", archives.ATTACKS)
def test_archive_is_refused(name: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack, says = archives.ATTACKS[name]
    place, unpacked = tmp_path / "in" / "x.edgeq", tmp_path / "unpacked"
    place.parent.mkdir()
    unpacked.mkdir()
    place.write_bytes(attack(tree(good)))
    monkeypatch.setattr(tempfile, "tempdir", str(unpacked))
    with pytest.raises(BundleError) as refusal:
        open_bundle(place)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert list(unpacked.iterdir()) == [], "a refused bundle leaves nothing behind"
    assert [p.name for p in tmp_path.rglob("*")] in (["in", "unpacked", "x.edgeq"], ["unpacked", "in", "x.edgeq"])


def test_the_untouched_copy_opens(copy: Path) -> None:
    directories.seal(copy)
    open_bundle(copy).close()


def test_nothing_is_loaded_before_the_checks(copy: Path) -> None:
    directories.flipped_byte(copy)
    code = (
        "import sys; from edgeq_device.cli import main; code = main(['verify', '--bundle', sys.argv[1]])\n"
        "assert 'onnxruntime' not in sys.modules and 'numpy' not in sys.modules; sys.exit(code)"
    )
    runtime = Path(__file__).parents[2] / "targets" / "runtime"
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy)], cwd=runtime, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7, done.stderr
    assert "was changed" in done.stderr
    assert "Traceback" not in done.stderr


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_changed_byte_is_refused_or_changes_nothing(data: st.DataObject, good_zip: Path, tmp_path: Path) -> None:
    original = good_zip.read_bytes()
    at = data.draw(st.integers(0, len(original) - 1))
    changed = bytearray(original)
    changed[at] ^= data.draw(st.integers(1, 255))
    place = tmp_path / "changed.edgeq"
    place.write_bytes(changed)
    with open_bundle(good_zip) as first:
        try:
            second = open_bundle(place)
        except BundleError:
            return
        # Only a date or a version in the zip's own headers changed, and the files are the same.
        with second:
            assert tree(second.root) == tree(first.root)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_archive_is_refused(share: float, good_zip: Path, tmp_path: Path) -> None:
    data = good_zip.read_bytes()
    place = tmp_path / "cut.edgeq"
    place.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(BundleError):
        open_bundle(place)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="does not exist"):
        open_bundle(tmp_path / "nothing")


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"it has no manifest\.json"):
        open_bundle(tmp_path)
