from __future__ import annotations

import io
import json
import struct
from contextlib import suppress

import numpy as np
import pytest
from edgeq_device.errors import DataError
from edgeq_device.prepare.arrays import FrameLimits, LargeFrameError, read_frame, write_frame
from hypothesis import given
from hypothesis import strategies as st


def test_reads_written_frames() -> None:
    stream = io.BytesIO()
    arrays = {
        "image": np.arange(6, dtype=np.float32).reshape(1, 2, 3),
        "empty": np.zeros((0, 4), np.int8),
        "one": np.array(True),
        "turned": np.arange(6, dtype=np.int64).reshape(2, 3).T,
    }
    write_frame(stream, {"do": "run", "session": 3}, arrays)
    write_frame(stream, {"do": "close"}, {})
    stream.seek(0)
    first = read_frame(stream)
    assert first is not None
    assert first[0] == {"do": "run", "session": 3}
    for name, array in arrays.items():
        assert first[1][name].dtype == array.dtype
        np.testing.assert_array_equal(first[1][name], array)
    assert read_frame(stream) == ({"do": "close"}, {})
    assert read_frame(stream) is None


def test_texts_have_no_bytes() -> None:
    with pytest.raises(DataError, match="'words' contains texts"):
        write_frame(io.BytesIO(), {}, {"words": np.array(["a"], dtype=object)})


def frame(listed: object, data: bytes = b"") -> bytes:
    text = json.dumps({"do": "run", "arrays": listed}).encode()
    return struct.pack("<I", len(text)) + text + data


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
SPECS = st.tuples(
    st.text(max_size=3),
    st.sampled_from(["<f4", "|b1", "<U3", "|O8", "f8,f8", "(4,)f8", "{", "M8[s]", "|V999999"]) | VALUES,
    st.lists(st.integers(-2, 2**63), max_size=70) | VALUES,
)


@given(st.binary(max_size=64) | st.lists(SPECS | VALUES, max_size=4).map(frame), st.binary(max_size=64))
def test_refuses_malformed_frames(head: bytes, rest: bytes) -> None:
    limits = FrameLimits(text=4096, values=256, arrays=2, array=1 << 16, total=1 << 16)
    with suppress(ValueError, EOFError):
        found = read_frame(io.BytesIO(head + rest), limits)
        assert found is None or sum(array.nbytes for array in found[1].values()) <= len(head + rest)


def test_sizes_are_refused_before_they_are_read() -> None:
    """Sizes beyond a limit are refused before the data are read. The data here are incomplete, so reading them would
    fail.
    """
    half = frame([["a", "<f4", [1 << 12]], ["b", "<f4", [1 << 12]]])
    with pytest.raises(LargeFrameError, match="arrays of 32768 bytes"):
        read_frame(io.BytesIO(half), FrameLimits(total=1 << 14))
    with pytest.raises(ValueError, match="an array of"):
        read_frame(io.BytesIO(half), FrameLimits(array=1 << 13))
    with pytest.raises(ValueError, match="with too many"):
        read_frame(io.BytesIO(half), FrameLimits(arrays=1))
    with pytest.raises(ValueError, match="a frame of 4000000000 bytes"):
        read_frame(io.BytesIO(struct.pack("<I", 4_000_000_000)))
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(half))
    with pytest.raises(ValueError, match="more than 3 values"):
        read_frame(io.BytesIO(frame([])), FrameLimits(values=3))
