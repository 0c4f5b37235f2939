from __future__ import annotations

import io

import numpy as np
import pytest
from edgeq_device.errors import DataError
from edgeq_device.frames import read_frame, write_frame


def test_what_is_written_is_read() -> None:
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
    with pytest.raises(DataError, match="'words' holds texts"):
        write_frame(io.BytesIO(), {}, {"words": np.array(["a"], dtype=object)})
