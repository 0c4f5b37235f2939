"""Test which files a path stands for."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

import pytest

from edgeq.data.open_source import find_files, find_matching_files
from edgeq.errors import DataError


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def test_folders_are_read_in_depth_and_sorted(tmp_path: Path) -> None:
    touch(tmp_path, "b/2.JPG", "a.png", "b/10.png", "notes.md", ".hidden.png", ".git/x.png", "preprocess.toml")
    found = find_files(tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in found.files] == ["a.png", "b/10.png", "b/2.JPG"]
    assert (found.kind, found.ignored, found.root) == ("images", 1, tmp_path)


def test_patterns(tmp_path: Path) -> None:
    touch(tmp_path, "val_1.npz", "val_0.npz", "calib.npz")
    found = find_files(f"{tmp_path}/val_*.npz")
    assert [p.name for p in found.files] == ["val_0.npz", "val_1.npz"]
    with pytest.raises(DataError, match="matches no file"):
        find_files(f"{tmp_path}/x*.npz")


def test_an_existing_name_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    touch(tmp_path, "a[1].npy")
    assert find_files(tmp_path / "a[1].npy").kind == "arrays"


def test_any_files_by_path(tmp_path: Path) -> None:
    touch(tmp_path, "a.wav", "b.wav", "c.txt", "preprocess.toml")
    found = find_files(tmp_path, "*.wav", paths=True)
    assert ([p.name for p in found.files], found.ignored) == (["a.wav", "b.wav"], 1)
    assert len(find_files(tmp_path, paths=True).files) == 3
    with pytest.raises(DataError, match=r"holds no file that matches '\*.mp3'"):
        find_files(tmp_path, "*.mp3", paths=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no files"):
        find_files(tmp_path / "empty", paths=True)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ((), "holds no samples"),
        (("a.md",), "1 other files"),
        (("a.png", "b.npy"), "several kinds of data"),
    ],
)
def test_folders_without_a_clear_answer(tmp_path: Path, names: tuple[str, ...], says: str) -> None:
    touch(tmp_path, *names)
    with pytest.raises(DataError, match=says):
        find_files(tmp_path)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        find_files(tmp_path / "nowhere")


def test_folders_that_link_to_themselves_end(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    assert len(find_files(tmp_path).files) == 1


def below(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in find_files(root).files]


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    touch(tmp_path, "store/cats/1.png", "store/cats/2.png", "data/dogs/1.png")
    (data / "cats").symlink_to(tmp_path / "store" / "cats", target_is_directory=True)
    (data / "cats2").symlink_to(tmp_path / "store" / "cats", target_is_directory=True)
    (data / "a-link").symlink_to(data / "dogs", target_is_directory=True)
    (data / "dogs" / "back").symlink_to(data, target_is_directory=True)
    (data / "itself").symlink_to(data / "itself")
    assert below(data) == ["cats/1.png", "cats/2.png", "dogs/1.png"]
    (tmp_path / "whole").symlink_to(data, target_is_directory=True)
    assert below(tmp_path / "whole") == ["cats/1.png", "cats/2.png", "dogs/1.png"]


def test_a_pattern_reads_no_file_twice_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    touch(tmp_path, "data/a/b/1.png", "data/a/2.png", "data/z/3.png", "data/.hidden/4.png", "store/5.png")
    for place, link in enumerate(("a/up", "a/b/top", "z/over", "back")):
        (data / link).symlink_to(data if place % 2 else data / "a", target_is_directory=True)
    (data / "linked").symlink_to(tmp_path / "store", target_is_directory=True)
    (data / "itself").symlink_to(data / "itself")

    def found(pattern: str) -> list[str]:
        return [os.path.relpath(path, data) for path in find_files(pattern).files]

    everything = ["a/2.png", "a/b/1.png", "linked/5.png", "z/3.png"]
    assert found(f"{data}/**/*.png") == everything
    assert found(f"{data}/**") == everything
    monkeypatch.chdir(tmp_path)
    assert found("data/**/*.png") == everything
    assert found("data/a/**/*.png")[:2] == everything[:2]
    assert found("data/z/over/**/2.png") == ["z/over/2.png"], "where only a link leads there, by its name"
    assert found("data/**/.hid*/*.png") == [".hidden/4.png"]


@pytest.mark.parametrize(
    "pattern",
    [
        "**",
        "**/*",
        "**/*.png",
        "a/**",
        "*/**/*.png",
        "**/b/*.png",
        "**/.h/*.png",
        "**/.*",
        "a/**/b/**/*.png",
        "a**/*.png",
    ],
)
def test_a_pattern_matches_what_glob_does(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (".", "a", "a/b", "a/b/c", "b", ".h", ".h/x", "a/.h", "ax"):
        touch(tmp_path, *(f"{folder}/{name}" for name in ("1.png", ".2.png", "3.txt")))
    monkeypatch.chdir(tmp_path)
    wanted = {path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()}  # noqa: PTH207
    assert find_matching_files(pattern) == sorted(wanted)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads every folder")
def test_a_link_to_what_may_not_be_read_is_one_line(tmp_path: Path) -> None:
    touch(tmp_path, "data/a.png", "closed/b.png")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "closed", target_is_directory=True)
    (tmp_path / "closed").chmod(0)
    try:
        with pytest.raises(DataError, match="cannot be read: Permission denied"):
            find_files(tmp_path / "data")
    finally:
        (tmp_path / "closed").chmod(0o700)


@pytest.mark.parametrize(
    "names",
    [
        ("a.png", "b.npy"),
        ("x/y/a.PNG", "x/z/b.npy"),
        ("a[1]/a.png", "labels.npy"),
        ("train-images-idx3-ubyte", "x/input_0.pb"),
    ],
)
def test_the_advice_on_several_kinds_matches_files(tmp_path: Path, names: tuple[str, ...]) -> None:
    touch(tmp_path / "d[0]", *names)
    with pytest.raises(DataError, match="several kinds of data") as caught:
        find_files(tmp_path / "d[0]")
    advised = re.search("as '(.*)'", caught.value.fix)
    assert advised is not None
    assert find_files(advised[1]).files == (tmp_path / "d[0]" / names[0],)


def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    with pytest.raises(DataError, match=r"no file that matches '\*.npz'"):
        find_files(tmp_path, "*.npz")
