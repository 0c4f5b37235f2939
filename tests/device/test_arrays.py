"""Test untrusted arrays: pickles are refused and headers are checked. Arrays are written with the same bytes every
time.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from edgeq_device.errors import DataError
from edgeq_device.prepare.arrays import read_arrays, write_npz
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

ARRAYS = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "a/b": np.array(3, np.int64)}


def npy(array: np.ndarray, **options: object) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def test_reads_written_arrays(tmp_path: Path) -> None:
    write_npz(tmp_path / "x.npz", ARRAYS)
    found = read_arrays(tmp_path / "x.npz")
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as loaded:
        np.testing.assert_array_equal(loaded["x"], ARRAYS["x"])


def test_bytes_depend_on_names_and_values_alone() -> None:
    first, second = io.BytesIO(), io.BytesIO()
    write_npz(first, ARRAYS)
    write_npz(second, {name: np.asarray(ARRAYS[name], order="F") for name in reversed(list(ARRAYS))})
    assert first.getvalue() == second.getvalue()
    with zipfile.ZipFile(first) as archive:
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


@given(npst.arrays(npst.scalar_dtypes().filter(lambda d: d.kind in "biufc"), npst.array_shapes(min_dims=0, min_side=0)))
def test_npy_files_of_numpy_are_read(array: np.ndarray) -> None:
    from edgeq_device.prepare.arrays import _read_npy

    for form in (array, np.asfortranarray(array)):
        data = npy(form)
        found = _read_npy(io.BytesIO(data), len(data), "here")
        assert found.dtype == array.dtype
        assert found.tobytes() == array.tobytes()


def test_an_npy_file_has_no_name(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", ARRAYS["x"])
    np.testing.assert_array_equal(read_arrays(tmp_path / "x.npy")[""], ARRAYS["x"])


def test_objects_are_refused_both_ways(tmp_path: Path) -> None:
    objects = np.array([{"a": 1}], dtype=object)
    with pytest.raises(DataError, match="contains Python objects"):
        write_npz(io.BytesIO(), {"x": objects})
    (tmp_path / "x.npy").write_bytes(npy(objects, allow_pickle=True))
    with pytest.raises(DataError, match="pickled Python objects"):
        read_arrays(tmp_path / "x.npy")
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", npy(objects, allow_pickle=True))
    with pytest.raises(DataError, match="pickled Python objects"):
        read_arrays(tmp_path / "x.npz")


def test_a_header_that_promises_too_much(tmp_path: Path) -> None:
    data = npy(np.zeros(3, np.float32)).replace(b"(3,)", b"(9999999999999,)"[:16])
    head = npy(np.zeros((10, 10), np.float32))
    lying = head.replace(b"'shape': (10, 10)", b"'shape': (99, 99)")
    for content in (lying, head[:-1], head + b"\0"):
        (tmp_path / "x.npy").write_bytes(content)
        with pytest.raises(DataError, match="its header states"):
            read_arrays(tmp_path / "x.npy")
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(DataError):
        read_arrays(tmp_path / "x.npy")


def npy_of(header: str, values: bytes = b"\0" * 8) -> bytes:
    text = header.encode("latin-1").ljust(118 if len(header) < 118 else len(header) + 1) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + values


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,",
        "(" * 9000,
        "-" * 9000 + "1",
        "[" * 60 + "]" * 60,
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -2)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (0, -5)}",
        "{'descr': '<f4', 'fortran_order': True, 'shape': (0, 99999999999999999999)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 70 + "2)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2.0,)}",
        "{'descr': '|V0', 'fortran_order': False, 'shape': (3,)}",
        "{'descr': 'nonsense', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': [('a', '<f4'), ('a', '<f4')], 'fortran_order': False, 'shape': (1,)}",
        "{'descr': " + "[('a', " * 50 + "'<f4'" + ")]" * 50 + ", 'fortran_order': False, 'shape': (3,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2L",
        "\x00\xff",
        '"""',
    ],
)
@pytest.mark.parametrize("values", [b"", b"\0" * 8])
def test_a_header_of_another_form(header: str, values: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(npy_of(header, values))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.write(tmp_path / "x.npy", "x.npy")
    for name in ("x.npy", "x.npz"):
        with pytest.raises(DataError) as caught:
            read_arrays(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeq_device.prepare.arrays.MAX_ARRAY_BYTES", 1000)
    write_npz(tmp_path / "x.npz", {"x": np.zeros(10_000, np.int8)})
    with pytest.raises(DataError, match="more than 1000"):
        read_arrays(tmp_path / "x.npz")
    np.save(tmp_path / "x.npy", np.zeros(10_000, np.int8))
    with pytest.raises(DataError, match="is larger than 1000"):
        read_arrays(tmp_path / "x.npy")


def test_a_member_that_is_no_array(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.txt", b"hello")
    with pytest.raises(DataError, match=r"member 'x.txt' is not an array"):
        read_arrays(tmp_path / "x.npz")


@given(st.binary(max_size=200))
def test_any_bytes_are_an_array_or_refused(data: bytes) -> None:
    from edgeq_device.prepare.arrays import _read_npy

    for content in (data, b"\x93NUMPY\x01\x00" + data):
        try:
            _read_npy(io.BytesIO(content), len(content), "here")
        except DataError:
            continue
        raise AssertionError("random bytes were taken for an array")


def test_a_truncated_npz(tmp_path: Path) -> None:
    write_npz(tmp_path / "x.npz", ARRAYS)
    data = (tmp_path / "x.npz").read_bytes()
    for size in range(2, len(data), 17):
        (tmp_path / "cut.npz").write_bytes(data[:size])
        with pytest.raises(DataError, match=r"cut\.npz"):
            read_arrays(tmp_path / "cut.npz")
