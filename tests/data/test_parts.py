"""Test the parts of a folder for calibration and validation, and files that are in both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.helpers import IMAGE_MODEL, floats, save_image
from edgeq.data.open_source import Data, has_parts
from edgeq.data.parts import choose_part, find_shared_files
from edgeq.data.samples import SourceSamples, open_samples


def made(root: Path, *names: str) -> tuple[Path, ...]:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(bytes([number]) * 9)
    return tuple(sorted(root / name for name in names))


@pytest.mark.parametrize(
    ("names", "calibration", "validation"),
    [
        (("calib/a", "val/b"), ["calib/a"], ["val/b"]),
        (("train2017/a", "val2017/b", "test2017/c"), ["train2017/a"], ["val2017/b"]),
        (("calibration.npz", "validation.npz"), ["calibration.npz"], ["validation.npz"]),
        (("train/cat/a", "train/dog/b", "test/cat/c"), ["train/cat/a", "train/dog/b"], ["test/cat/c"]),
        # "train" and "truck" are classes here
        (("train/a", "truck/b"), ["train/a", "truck/b"], ["train/a", "truck/b"]),
        (("val/a", "test/b"), ["test/b", "val/a"], ["test/b", "val/a"]),
        (("trainers/a", "valves/b"), ["trainers/a", "valves/b"], ["trainers/a", "valves/b"]),
    ],
)
def test_parts_follow_from_names(
    tmp_path: Path, names: tuple[str, ...], calibration: list[str], validation: list[str]
) -> None:
    files = made(tmp_path, *names)
    assert choose_part(tmp_path, files, None) == (tmp_path, files, "")
    for role, expected in (("calibration", calibration), ("validation", validation)):
        root, chosen, note = choose_part(tmp_path, files, role)  # type: ignore[arg-type]
        assert [path.relative_to(tmp_path).as_posix() for path in chosen] == expected
        assert bool(note) == (len(expected) < len(names))
        assert all(path.is_relative_to(root) for path in chosen)


def test_a_folder_with_parts_gives_each_role_its_own(tmp_path: Path) -> None:
    for part, labels in (("train", ("ant", "bee")), ("val", ("ant", "bee"))):
        for label in labels:
            save_image(tmp_path / part / label / "1.png")
    data = Data(tmp_path, "none")
    assert has_parts(data)
    samples = open_samples(Data(tmp_path, "none", role="validation"), IMAGE_MODEL)
    assert isinstance(samples, SourceSamples)
    assert [(s.context["path"], s.label) for s in samples] == [("ant/1.png", 0), ("bee/1.png", 1)]
    assert f"{tmp_path}: val for validation, train left out" in samples.notes
    assert len(open_samples(data, IMAGE_MODEL)) == 4


def test_arrays_of_two_parts_are_not_mixed(tmp_path: Path) -> None:
    for name, count in (("calibration", 3), ("validation", 5)):
        np.savez(tmp_path / f"{name}.npz", x=floats(count, 3, 8, 8))
    assert len(open_samples(Data(tmp_path, role="calibration"), IMAGE_MODEL)) == 3
    assert len(open_samples(Data(tmp_path, role="validation"), IMAGE_MODEL)) == 5


def test_files_are_shared_by_path_and_by_content(tmp_path: Path) -> None:
    one = made(tmp_path / "one", "a", "b", "c")
    other = made(tmp_path / "other", "x", "y")  # with the contents of a and b
    assert find_shared_files(one, other) == set(one[:2])
    assert find_shared_files(one, one[2:]) == {one[2]}
    assert find_shared_files(one, made(tmp_path / "empty", *"pqrstu")[5:]) == set()
