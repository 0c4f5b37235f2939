"""Which files a path stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq.data.files import find_files
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
    assert [p.name for p in find_files(tmp_path, "*.wav", paths=True).files] == ["a.wav", "b.wav"]
    assert len(find_files(tmp_path, paths=True).files) == 3
    with pytest.raises(DataError, match="holds no files"):
        find_files(tmp_path, "*.mp3", paths=True)


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
