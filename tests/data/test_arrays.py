"""Test the reading of stored arrays slice by slice, and hostile array files."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeq.data.arrays import ArrayFile, is_idx, load_labels, read_arrays
from edgeq.data.open_source import kind_of
from edgeq.errors import DataError

arrays = hnp.arrays(
    st.sampled_from(["u1", "<i4", ">f4", "<f8", "?"]), hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5)
)


@given(array=arrays, fortran=st.booleans(), packed=st.booleans())
def test_slices_are_numpys(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, fortran: bool, packed: bool
) -> None:
    path = tmp_path_factory.mktemp("a") / "x.npz"
    stored = np.asfortranarray(array) if fortran else array
    (np.savez_compressed if packed else np.savez)(path, x=stored)
    single = path.with_suffix(".npy")
    np.save(single, stored)
    for file, key in ((path, "x"), (single, "")):
        with ArrayFile(file) as opened:
            slices = opened.slices(key)
            for index in [*range(len(array)), 0]:
                np.testing.assert_array_equal(slices.take(index), array[index])
            np.testing.assert_array_equal(slices.load_all(), array)
            np.testing.assert_array_equal(opened.load(key), array)
            assert slices.take(0).dtype.isnative


@pytest.mark.parametrize(
    "code", [(0x08, "u1"), (0x09, "i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")]
)
@pytest.mark.parametrize("name", ["t-images-idx3-ubyte", "t.idx3-ubyte", "t-images-idx3-ubyte.gz"])
def test_idx(tmp_path: Path, code: tuple[int, str], name: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(code[1])
    data = struct.pack(">HBB3I", 0, code[0], 3, 2, 3, 4) + array.tobytes()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert is_idx(path)
    with ArrayFile(path) as file:
        assert np.array_equal(file.slices("").take(1), array[1])


def test_labels_are_plain_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", y=np.arange(3, dtype=np.uint8), column=np.arange(3)[:, None], two=np.zeros((2, 2)))
    with ArrayFile(tmp_path / "x.npz") as file:
        assert load_labels(file, "y") == [0, 1, 2]
        assert load_labels(file, "column") == [0, 1, 2]
        with pytest.raises(DataError, match="one label per sample"):
            load_labels(file, "two")


def npy_header(text: str) -> bytes:
    body = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (open, ("pickled-code-ran", "w"))


HUGE = npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000)}")
ATTACKS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "not_numpy": (b"hello, world, this is text", "cannot be read"),
    "huge_header": (HUGE + b"\0" * 64, "claims float32"),
    "negative": (npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4)}"), "negative size"),
    "object": (
        npy_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}") + pickle.dumps(Evil()),
        "pickled Python objects",
    ),
    "structured": (npy_header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}") + b"\0" * 4, "plain"),
    "code_in_header": (npy_header("{'descr': __import__('os').system('true'), 'shape': ()}"), "cannot be read"),
    "long_header": (npy_header("{'descr': '<f4', 'shape': (" + "1," * 20000 + ")}"), "cannot be read"),
    "unclosed": (npy_header("{'descr': '<f4', 'shape': (1,"), "cannot be read"),
    "mixed_keys": (npy_header("{'descr': '<f4', 'fortran_order': False, b'shape': (1,)}"), "cannot be read"),
    "old_octal": (npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (04,)}"), "cannot be read"),
    "future_version": (b"\x93NUMPY\x09\x00" + b"\0" * 64, "version 9.0"),
    "trailing": (npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}") + b"\0" * 8, "claims"),
}


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_hostile_npy(tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, says = ATTACKS[attack]
    (tmp_path / "x.npy").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", data)
    for name in ("x.npy", "x.npz"):
        with pytest.raises(DataError, match=says) as caught:
            read_arrays(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "pickled-code-ran").exists()


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEQ_BUDGET", "sample=1MiB")
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, x=np.zeros((1, 2 << 20), np.uint8), f=np.asfortranarray(np.zeros((1024, 2048), np.uint8)))
    assert path.stat().st_size < 10_000
    with ArrayFile(path) as file:
        with pytest.raises(DataError, match="a sample may take"):
            file.slices("x")
        for read in (lambda: file.load("x"), lambda: file.slices("f")):
            with pytest.raises(DataError, match="bytes"):
                read()


def test_arrays_of_one_archive_are_read_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompressed arrays of `np.savez` can be read in turn, without a seek forward.

    On some versions of Python such a seek starts at the position of another array.
    """
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((40, 5000)) for name in "abc"}
    np.savez(tmp_path / "x.npz", **arrays)
    seek = zipfile.ZipExtFile.seek

    def only_back(member: zipfile.ZipExtFile, offset: int, whence: int = 0) -> int:
        assert (offset, whence) == (0, 0)
        return seek(member, offset, whence)

    monkeypatch.setattr(zipfile.ZipExtFile, "seek", only_back)
    with ArrayFile(tmp_path / "x.npz") as file:
        slices = {name: file.slices(name) for name in arrays}
        for index in (*range(0, 40, 3), 2, 0, 39):
            for name, values in arrays.items():
                np.testing.assert_array_equal(slices[name].take(index), values[index])


def test_damaged_contents_are_found_when_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.arange(1000, dtype=np.int64).reshape(10, 100))
    data = bytearray(path.read_bytes())
    data[4000] ^= 0xFF
    path.write_bytes(data)
    with ArrayFile(path) as file, pytest.raises(DataError, match=r"CRC"):
        file.load("x")
    path.write_bytes(data[:3000])
    with pytest.raises(DataError, match="cannot be read"):
        read_arrays(path)


def test_truncated_gzip_and_idx(tmp_path: Path) -> None:
    data = struct.pack(">HBB2I", 0, 8, 2, 5, 100) + b"\1" * 500
    path = tmp_path / "x-idx2-ubyte"
    path.write_bytes(data[:-10])
    with pytest.raises(DataError, match="holds 490"):
        read_arrays(path)
    packed = tmp_path / "x-idx2-ubyte.gz"
    packed.write_bytes(gzip.compress(data[:-10]))
    with ArrayFile(packed) as file, pytest.raises(DataError, match="truncated"):
        file.slices("").take(4)
    noise = np.random.default_rng(0).bytes(500)
    packed.write_bytes(gzip.compress(data[:12] + noise)[:-20])
    with pytest.raises(DataError, match="end-of-stream"), ArrayFile(packed) as file:
        file.slices("").take(4)
    path.write_bytes(b"\0\0\x07\1" + b"\0" * 8)
    with pytest.raises(DataError, match="not an IDX"):
        read_arrays(path)


def test_an_archive_of_too_many_arrays(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(1))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for index in range(10_001):
            archive.writestr(f"{index}.npy", b"")
    with pytest.raises(DataError, match="10001 arrays"):
        read_arrays(tmp_path / "x.npz")


@pytest.mark.parametrize("name", ["X.NPY", "X.NPZ", "TRAIN-IMAGES-IDX1-UBYTE", "TRAIN-IMAGES-IDX1-UBYTE.GZ"])
def test_suffixes_in_capitals(tmp_path: Path, name: str) -> None:
    values = np.arange(3, dtype=np.uint8)
    with (tmp_path / name).open("wb") as file:
        if name.endswith("NPY"):
            np.save(file, values)
        elif name.endswith("NPZ"):
            np.savez(file, a=values)
        else:
            idx = b"\0\0\x08\1\0\0\0\3" + values.tobytes()
            file.write(gzip.compress(idx) if name.endswith("GZ") else idx)
    assert kind_of(tmp_path / name) == "arrays"
    with ArrayFile(tmp_path / name) as opened:
        assert [opened.load(key).tolist() for key in opened.headers] == [[0, 1, 2]]
