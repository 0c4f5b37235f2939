from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq import demo
from edgeq.calibration.ranges import Range
from edgeq.calibration.show import open_calibration
from edgeq.calibration.table import (
    CACHE,
    FLATBUFFERS,
    JSON,
    decode_table,
    encode_table,
    read_cache,
    read_flatbuffers,
    read_json,
    read_native,
    read_table,
    read_tables,
    table_of,
    write_native,
    write_tables,
)
from edgeq.errors import CalibrationError
from edgeq.jobs.package import package

RANGES = {"z/out": Range(-27.8, -0.1), "a:0": Range(0.0, 6.0), "ünï": Range(-1e-8, 3e-9), "zero": Range(0.0, 0.0)}


def test_the_absolute_maximum_is_written_even_of_an_all_negative_tensor(tmp_path: Path) -> None:
    write_tables(tmp_path, RANGES)
    for read, name in ((read_flatbuffers, FLATBUFFERS), (read_json, JSON), (read_cache, CACHE)):
        table = read(tmp_path / name)
        assert table == read_tables(tmp_path) == read_table(tmp_path / name)
        assert table["z/out"] == np.float32(27.8)
        assert set(table) == set(RANGES)
    assert "z/out 27.8\n" in (tmp_path / CACHE).read_text("utf-8")
    assert json.loads((tmp_path / JSON).read_text("utf-8"))["z/out"] == "27.8"


def test_onnxruntimes_own_classes_read_the_table(tmp_path: Path) -> None:
    from onnxruntime.quantization.CalTableFlatBuffers.TrtTable import TrtTable

    write_tables(tmp_path, RANGES)
    root = TrtTable.GetRootAsTrtTable((tmp_path / FLATBUFFERS).read_bytes(), 0)
    pairs = [(root.Dict(i).Key(), float(root.Dict(i).Value())) for i in range(root.DictLength())]
    assert [key for key, _ in pairs] == sorted(name.encode() for name in RANGES)
    assert dict(pairs)[b"z/out"] == pytest.approx(27.8)


def test_a_table_that_onnxruntime_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flatbuffers
    from onnxruntime.quantization.CalTableFlatBuffers import KeyValue, TrtTable

    builder = flatbuffers.Builder(64)
    entries = []
    for name, text in (("a", "1.5"), ("b", "2e-3")):
        key, val = builder.CreateString(name), builder.CreateString(text)
        KeyValue.KeyValueStart(builder)
        KeyValue.KeyValueAddKey(builder, key)
        KeyValue.KeyValueAddValue(builder, val)
        entries.append(KeyValue.KeyValueEnd(builder))
    TrtTable.TrtTableStartDictVector(builder, 2)
    for entry in reversed(entries):
        builder.PrependUOffsetTRelative(entry)
    vector = builder.EndVector()
    TrtTable.TrtTableStart(builder)
    TrtTable.TrtTableAddDict(builder, vector)
    builder.Finish(TrtTable.TrtTableEnd(builder))
    (tmp_path / FLATBUFFERS).write_bytes(bytes(builder.Output()))
    assert read_flatbuffers(tmp_path / FLATBUFFERS) == {"a": 1.5, "b": float(np.float32(2e-3))}


@pytest.mark.parametrize("bad", [Range(0, float("inf")), Range(float("nan"), 1), Range(0, 1e39)])
def test_a_range_that_is_not_finite_is_refused_and_nothing_is_written(tmp_path: Path, bad: Range) -> None:
    with pytest.raises(CalibrationError, match="'bad'"):
        write_tables(tmp_path / "out", {**RANGES, "bad": bad})
    assert not (tmp_path / "out").exists()


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="'missing' has no range"):
        write_tables(tmp_path / "out", RANGES, tensors=[*RANGES, "missing"])


@pytest.mark.parametrize("name", ["", "a b", "a\nb"])
def test_names_that_the_text_form_cannot_carry(tmp_path: Path, name: str) -> None:
    with pytest.raises(CalibrationError, match="white space"):
        write_tables(tmp_path, {name: Range(0, 1)})


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=30))
@settings(max_examples=50)
def test_flatbuffers_round_trip(table: dict[str, str]) -> None:
    pairs = decode_table(encode_table(table))
    assert dict(pairs) == table
    assert [k.encode() for k, _ in pairs] == sorted(k.encode() for k in table)


def test_entries_that_share_one_long_name_are_refused() -> None:
    """Entries that share a long name are refused: 300 KB of offsets to one entry of 150 KB would become 12 GB."""
    whole = encode_table({"a" * 150_000: "1"})
    table = int.from_bytes(whole[:4], "little")
    vector = int.from_bytes(whole[table + 4 : table + 8], "little") + table + 4
    entry = int.from_bytes(whole[vector + 4 : vector + 8], "little") + vector + 4
    count = 30_000
    # A vector at the end. All of its offsets lead forward to a copy of the entry after it.
    body = bytearray(whole)
    body += b"\0" * (-len(body) % 4)
    start = len(body)
    body[table + 4 : table + 8] = (start - table - 4).to_bytes(4, "little")
    behind = start + 4 + 4 * count
    body += count.to_bytes(4, "little")
    for index in range(count):
        body += (behind + entry - (start + 4 + 4 * index)).to_bytes(4, "little")
    body += whole
    with pytest.raises(ValueError, match="more than possible"):
        decode_table(bytes(body))


@given(st.data())
@settings(max_examples=200)
def test_damaged_flatbuffers_end_in_an_error_or_a_table(data: st.DataObject) -> None:
    whole = bytearray(encode_table({"conv/out": "1.5", "relu": "0.25"}))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        pairs = decode_table(damaged)
    except (ValueError, IndexError, struct.error):
        return
    assert all(isinstance(text, str) for pair in pairs for text in pair)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (JSON, b"{", "not JSON"),
        (JSON, b"[1]", "not an object of strings"),
        (JSON, b'{"a": 1}', "not an object of strings"),
        (JSON, b'{"a": "inf"}', "magnitude inf"),
        (JSON, b'{"a": "1", "a": "2"}', "twice"),
        (CACHE, b"a\n", "not 'name value'"),
        (CACHE, b"a x\n", "the value 'x'"),
        (CACHE, b"a -1\n", "magnitude -1"),
        (CACHE, b"\xff 1\n", "not text"),
        (FLATBUFFERS, b"abc", "not a calibration table"),
        (FLATBUFFERS, b"\xff" * 64, "not a calibration table"),
        ("cache.trt", b"TRT-8601-X\na: zz\n", "name: hex"),
        ("cache.trt", b"TRT-8601-X\na: 7f800000\n", "magnitude inf"),
        ("cache.trt", b"TRT-8601-X\na: 3f800000\na: 3f800000\n", "twice"),
        ("cache.trt", b"TRT-x\n", "does not begin"),
    ],
)
def test_wrong_files_are_reported(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        read_table(tmp_path / name)


def test_keys_out_of_order_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("edgeq.calibration.table.sorted", lambda x, key: list(x), raising=False)
        (tmp_path / FLATBUFFERS).write_bytes(encode_table({"b": "1", "a": "2"}))
    with pytest.raises(CalibrationError, match="has unsorted keys"):
        read_flatbuffers(tmp_path / FLATBUFFERS)


def test_tables_that_disagree_are_reported(tmp_path: Path) -> None:
    write_tables(tmp_path, RANGES)
    (tmp_path / CACHE).write_text("a 1\n")
    with pytest.raises(CalibrationError, match=f"{CACHE} differs"):
        read_tables(tmp_path)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_tables(tmp_path)


def test_the_native_cache(tmp_path: Path) -> None:
    path = tmp_path / "model.cache"
    write_native(path, RANGES, version="8503", algorithm="EntropyCalibration2")
    lines = path.read_text("utf-8").splitlines()
    assert lines[0] == "TRT-8503-EntropyCalibration2"
    assert f"a:0: {struct.pack('>f', np.float32(6 / 127)).hex()}" in lines
    table = read_native(path)
    assert table["z/out"] == pytest.approx(27.8, rel=1e-6)
    assert table["zero"] > 0  # never zero, because values are divided by the scale
    assert read_table(path) == table


def test_a_native_cache_as_tensorrt_writes_it(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("TRT-8601-EntropyCalibration2\ninput: 3c010a14\n(Unnamed Layer* 0) [Conv]: 3d1cef9b\n")
    table = read_native(tmp_path / "c")
    assert table["input"] == pytest.approx(1.0000, rel=1e-3)
    assert set(table) == {"input", "(Unnamed Layer* 0) [Conv]"}


def test_a_first_line_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="not a first line"):
        write_native(tmp_path / "c", RANGES, version="8.6")


def test_the_values_are_float32(tmp_path: Path) -> None:
    assert table_of({"t": Range(0.0, 0.1)}) == {"t": float(np.float32(0.1))}


def test_the_tables_of_a_bundle_are_shown(tmp_path: Path) -> None:
    package(demo.MODEL, demo.CALIBRATION, tmp_path / "b", timed=False, emulate=False)
    shown = open_calibration(tmp_path / "b" / "calibration.zip")
    assert isinstance(shown, dict)
    assert "logits" in {tensor["name"] for tensor in shown["tensors"]}
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("calibration/calibration.json", "{}")
    with pytest.raises(CalibrationError, match=r"other\.zip does not contain the tables of a bundle"):
        open_calibration(tmp_path / "other.zip")
