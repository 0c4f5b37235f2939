"""Test array files as records: prepared inputs, raw items with keys and labels, images inside arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.helpers import IMAGE_MODEL, encoded, floats, pixels, signature, spec
from edgeq.data.array_files import open_array_files
from edgeq.data.samples import open_samples
from edgeq.data.source_options import SourceOptions
from edgeq.errors import DataError

TWO = signature(spec("a", "N", 2), spec("b", "N", 3))


def test_prepared_stacks_and_single_samples(tmp_path: Path) -> None:
    stack, single = floats(4, 3, 8, 8), floats(3, 8, 8, seed=1)
    np.save(tmp_path / "0.npy", stack)
    np.savez(tmp_path / "1.npz", x=single)
    files = open_array_files(
        tmp_path, (tmp_path / "0.npy", tmp_path / "1.npz"), IMAGE_MODEL, SourceOptions(), prepared=True
    )
    assert (len(files), files.rows, files.prepared) == (5, "one", True)
    records = list(files.read_records(range(5)))
    assert np.array_equal(records[2].raw["x"], stack[2:3])
    assert np.array_equal(records[4].raw["x"], single)
    assert records[2].name == f"{tmp_path / '0.npy'}[2]"
    assert [r.raw["x"].shape[0] for r in files.read_records(range(1, 5, 3))] == [1, 3]


def test_several_inputs_with_labels(tmp_path: Path) -> None:
    a, b = floats(5, 2), floats(5, 3)
    np.savez_compressed(tmp_path / "x.npz", b=b, a=a, labels=np.arange(5))
    files = open_array_files(tmp_path, (tmp_path / "x.npz",), TWO, SourceOptions(), prepared=True)
    record = next(iter(files.read_records(range(3, 4))))
    assert np.array_equal(record.raw["a"], a[3:4])
    assert np.array_equal(record.raw["b"], b[3:4])
    assert record.label == 3


def test_raw_items_by_key(tmp_path: Path) -> None:
    images = np.stack([pixels(9, 7, i) for i in range(3)])
    np.savez(tmp_path / "x.npz", X=images, Y=np.array([5, 6, 7], np.uint8))
    options = SourceOptions(key="X", label="Y", layout="HWC")
    files = open_array_files(tmp_path, (tmp_path / "x.npz",), IMAGE_MODEL, options, prepared=False)
    records = list(files.read_records(range(3)))
    assert [r.label for r in records] == [5, 6, 7]
    assert np.array_equal(records[1].raw["x"], images[1])
    # If there is only one array besides the labels, it needs no key. Several leading axes together count samples.
    np.savez(tmp_path / "y.npz", images=images[:, None], Y=np.arange(3))
    files = open_array_files(
        tmp_path, (tmp_path / "y.npz",), IMAGE_MODEL, SourceOptions(label="Y", layout="HWC"), prepared=False
    )
    assert np.array_equal(next(iter(files.read_records(range(2, 3)))).raw["x"], images[2])


def test_unlabelled_files_are_read_with_the_same_options(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", X=np.zeros((2, 9, 7, 3), np.uint8))
    options = SourceOptions(key="X", label="Y", layout="HWC")
    files = open_array_files(tmp_path, (tmp_path / "x.npz",), IMAGE_MODEL, options, prepared=False)
    assert [r.label for r in files.read_records(range(2))] == [None, None]


def test_images_in_arrays(tmp_path: Path) -> None:
    images = [pixels(9 + i, 7, i) for i in range(4)]
    blobs = [encoded(image) for image in images]
    offsets = np.cumsum([0] + [len(b) for b in blobs])
    joined = np.frombuffer(b"".join(blobs), np.uint8)
    options = SourceOptions(key="X", encoded="jpg", offsets="off", label="Y", layout="HWC")
    np.savez_compressed(tmp_path / "x.npz", jpg=joined, off=offsets, Y=np.arange(4))
    files = open_array_files(tmp_path, (tmp_path / "x.npz",), IMAGE_MODEL, options, prepared=False)
    for record, image in zip(files.read_records(range(1, 4, 2)), images[1::2], strict=True):
        assert np.array_equal(record.raw["x"].pixels, image)
    offsets[2] = len(joined) + 5
    np.savez(tmp_path / "x.npz", jpg=joined, off=offsets, Y=np.arange(4))
    with pytest.raises(DataError, match="offsets"):
        list(
            open_array_files(tmp_path, (tmp_path / "x.npz",), IMAGE_MODEL, options, prepared=False).read_records(
                range(4)
            )
        )
    np.savez(tmp_path / "x.npz", jpg=joined.astype(np.int16), off=offsets)
    with pytest.raises(DataError, match="is not bytes"):
        open_array_files(tmp_path, (tmp_path / "x.npz",), IMAGE_MODEL, options, prepared=False)
    np.savez(tmp_path / "x.npz", jpg=joined)
    with pytest.raises(DataError, match="no offsets"):
        open_array_files(tmp_path, (tmp_path / "x.npz",), IMAGE_MODEL, options, prepared=False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (SourceOptions(key="Z", layout="HWC"), "no array 'Z'"),
        (SourceOptions(key="flat", layout="HWC"), "fewer axes than the layout"),
        (SourceOptions(key="none", layout="HWC"), "empty array"),
        (SourceOptions(layout="HWC"), "no array for the model input 'x'"),
        (SourceOptions(key="X", input="y"), "source.input = 'y'"),
    ],
)
def test_unfit_options(tmp_path: Path, options: SourceOptions, says: str) -> None:
    np.savez(tmp_path / "x.npz", X=np.zeros((2, 9, 7, 3)), flat=np.zeros(4), none=np.zeros((0, 9, 7, 3)))
    with pytest.raises(DataError, match=says):
        open_array_files(tmp_path, (tmp_path / "x.npz",), IMAGE_MODEL, options, prepared=False)


def test_labels_must_match_the_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", X=np.zeros((2, 9, 7, 3)), Y=np.arange(3))
    files = open_array_files(
        tmp_path, (tmp_path / "x.npz",), IMAGE_MODEL, SourceOptions(key="X", label="Y"), prepared=False
    )
    with pytest.raises(DataError, match="2 samples and 3 labels"):
        list(files.read_records(range(2)))


def labels_of(path: Path, options: SourceOptions, *, prepared: bool) -> list[object]:
    files = open_array_files(path.parent, (path,), IMAGE_MODEL, options, prepared=prepared)
    return [record.label for record in files.read_records(range(len(files)))]


@pytest.mark.parametrize("key", ["label", "labels"])
def test_labels_need_no_name_where_there_are_steps(tmp_path: Path, key: str) -> None:
    images = np.stack([pixels(8, 8, i) for i in range(3)])
    for name in ("X", "x"):
        np.savez(tmp_path / "x.npz", **{name: images, key: np.array([5, 6, 7])})
        assert labels_of(tmp_path / "x.npz", SourceOptions(layout="HWC"), prepared=False) == [5, 6, 7]
    np.savez(tmp_path / "x.npz", X=images, **{key: np.zeros((3, 2, 5))})
    assert labels_of(tmp_path / "x.npz", SourceOptions(key="X", layout="HWC"), prepared=False) == [None] * 3


def test_prepared_arrays_with_labels_of_another_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=floats(3, 3, 8, 8), y=np.array([5, 6, 7]))
    assert labels_of(tmp_path / "x.npz", SourceOptions(label="y"), prepared=True) == [5, 6, 7]
    with pytest.raises(DataError, match="not an input of the model"):
        labels_of(tmp_path / "x.npz", SourceOptions(), prepared=True)


def test_one_number_is_no_sample(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", X=np.float32(3))
    with pytest.raises(DataError, match="contains one number, not samples"):
        labels_of(tmp_path / "x.npz", SourceOptions(), prepared=False)


def test_labels_that_are_not_one_a_sample_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=floats(4, 3, 8, 8), labels=np.eye(4))
    samples = open_samples(tmp_path / "a.npz", IMAGE_MODEL)
    assert [s.label for s in samples] == [None] * 4
    assert any("'labels' of shape [4, 4] does not have one label per sample" in note for note in samples.notes)  # type: ignore[attr-defined]
    np.savez(tmp_path / "a.npz", x=floats(4, 3, 8, 8), labels=np.arange(4), label=np.eye(4))
    samples = open_samples(tmp_path / "a.npz", IMAGE_MODEL)
    assert [s.label for s in samples] == [0, 1, 2, 3]
    assert not any("is left out" in note for note in samples.notes)  # type: ignore[attr-defined]
