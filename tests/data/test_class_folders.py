"""Test sub-folders as classes: which folders are classes, and which files they label."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.helpers import IMAGE_MODEL, floats, save_image
from edgeq import register_preprocess
from edgeq.data.classes import empty_class_note, number_folders, stray_note
from edgeq.data.samples import open_samples


def files(root: Path, *names: str) -> tuple[Path, ...]:
    for name in names:
        save_image(root / name)
    return tuple(root / name for name in names)


def test_class_folders(tmp_path: Path) -> None:
    for number, (names, classes) in enumerate(
        (
            (("cat/a.png", "dog/b.png", "dog/c/d.png"), {"cat": 0, "dog": 1}),
            (("03/a.png", "10/b.png"), {"03": 3, "10": 10}),
            (("3/a.png", "03/b.png"), {"03": 0, "3": 1}),
            (("images/a.png",), {}),
            (("top.png", "a/b.png", "c/d.png"), {}),
            ((), {}),
        )
    ):
        assert number_folders(tmp_path / str(number), files(tmp_path / str(number), *names)).numbers == classes


def test_a_class_without_samples_keeps_its_number(tmp_path: Path) -> None:
    for name in ("bird", ".git", "__MACOSX"):
        (tmp_path / name).mkdir()
    found = files(tmp_path, "ant/a.png", "cat/b.png")
    classes = number_folders(tmp_path, found).numbers
    assert classes == {"ant": 0, "bird": 1, "cat": 2}
    assert empty_class_note(tmp_path, found, classes) == (
        f"{tmp_path}: no samples of 1 of 3 class folders (bird); they keep their numbers",
    )
    assert empty_class_note(tmp_path, found, {"ant": 0, "cat": 2}) == ()


def test_files_beside_class_folders_are_named(tmp_path: Path) -> None:
    found = files(tmp_path, "a/1.png", "b/2.png", "top.png")
    assert stray_note(tmp_path, found) == (
        f"{tmp_path}: the sub-folders give no labels, because top.png is in none of them",
    )
    assert stray_note(tmp_path, found[:2]) == stray_note(tmp_path, found[::2]) == stray_note(tmp_path, found[2:]) == ()
    assert any("top.png is in none" in note for note in open_samples(tmp_path, IMAGE_MODEL, preprocess="none").notes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("labels", [None, "folder"])
def test_arrays_and_files_that_functions_read_have_the_labels_of_their_folders(
    tmp_path: Path, labels: str | None
) -> None:
    register_preprocess("loaded", reads="path", source={"pattern": "*.bin"})(
        lambda path: np.frombuffer(path.read_bytes(), np.float32).reshape(3, 8, 8)
    )
    for name in ("no", "yes"):
        (tmp_path / "arrays" / name).mkdir(parents=True)
        np.save(tmp_path / "arrays" / name / "1.npy", floats(2, 3, 8, 8))
        (tmp_path / "files" / name).mkdir(parents=True)
        (tmp_path / "files" / name / "1.bin").write_bytes(floats(3, 8, 8).tobytes())
    arrays = list(open_samples(tmp_path / "arrays", IMAGE_MODEL, labels=labels))
    assert [(s.label, s.context["class"]) for s in arrays] == [(0, "no"), (0, "no"), (1, "yes"), (1, "yes")]
    read = list(open_samples(tmp_path / "files", IMAGE_MODEL, preprocess="loaded", labels=labels))
    assert [(s.label, s.context["path"]) for s in read] == [(0, "no/1.bin"), (1, "yes/1.bin")]


def test_labels_in_a_file_go_before_its_folder_and_lists_name_paths(tmp_path: Path) -> None:
    for name, held in (("no", {"label": np.array([7])}), ("yes", {})):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "1.npz", x=floats(1, 3, 8, 8), **held)
    assert [s.label for s in open_samples(tmp_path, IMAGE_MODEL)] == [7, 1]
    listed = {"no/1.npz": 3, "yes/1.npz": 4}
    assert [s.label for s in open_samples(tmp_path, IMAGE_MODEL, labels=listed)] == [3, 4]
