"""Test the names that a bundle may contain."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgeq_device.bundle.manifest import check_file_name, check_file_names, is_plain_name
from edgeq_device.errors import BundleError
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "models/model/a b/weights.bin",
        "ümlaut.onnx",
        "a/..b/c...d",
        "console",
        "com/aux1",
        "\U0001f40d猫",
    ],
)
def test_allowed(name: str) -> None:
    assert check_file_name(name, "here") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "../a",
        "a/../b",
        "a/./b",
        "a//b",
        "a/",
        "a\\b",
        "C:a",
        "a\0b",
        "a\nb",
        "a\x9bb",
        "a\u202eb",
        "a\u2028b",
        "a\ud800b",
        "CON",
        "a/nul.txt",
        "Com1/b",
        "lpt\u00b2 .x",
        "a:b",
        "a.",
        "a ",
        "x" * 513,
        ".",
    ],
)
def test_refused(name: str) -> None:
    with pytest.raises(BundleError):
        check_file_name(name, "here")


@given(st.text(max_size=40))
def test_allowed_names_stay_inside_the_folder(name: str) -> None:
    try:
        check_file_name(name, "here")
    except BundleError:
        return
    root = Path("/bundle")
    assert (root / name).resolve().is_relative_to(root)
    assert (root / name).resolve() != root


def test_sets_of_names() -> None:
    check_file_names(["a/b", "a/c", "ab"], "here")
    with pytest.raises(BundleError, match="occurs twice"):
        check_file_names(["a/B", "A/b"], "here")
    with pytest.raises(BundleError, match="both a file and the directory"):
        check_file_names(["a/b", "a/b/c"], "here")
    # 1,000 names in 240 folders each would create every one of these folders when the bundle is unpacked.
    deep = [f"{number}/{'a/' * 240}f" for number in range(1_000)]
    with pytest.raises(BundleError, match="in more than 20000 folders"):
        check_file_names(deep, "here")
    check_file_names([f"{'a/' * 240}{number}" for number in range(1_000)], "here")


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("x86_64-vnni", True),
        ("a.b+c", True),
        ("../a", False),
        ("", False),
        (".a", False),
        ("a/b", False),
        ("a" * 101, False),
        (None, False),
    ],
)
def test_plain_names(name: object, plain: bool) -> None:
    assert is_plain_name(name) is plain
