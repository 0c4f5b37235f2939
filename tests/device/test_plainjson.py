"""Test untrusted JSON: it gives an object or BundleError, never another exception."""

from __future__ import annotations

import json

import pytest
from edgeq_device.errors import BundleError
from edgeq_device.system.plainjson import MAX_DEPTH, parse_json
from hypothesis import given
from hypothesis import strategies as st

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_objects_are_read_as_json_reads_them(value: dict[str, object]) -> None:
    for ascii_only in (True, False):
        data = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        assert parse_json(data, "here") == value


@given(st.binary(max_size=100))
def test_other_bytes_are_refused(data: bytes) -> None:
    try:
        value = parse_json(data, "here")
    except BundleError:
        return
    assert value == json.loads(data)


def test_depth() -> None:
    deepest = '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH
    assert parse_json(deepest.encode(), "here")
    with pytest.raises(BundleError, match="nested more than"):
        parse_json(('{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1)).encode(), "here")
    brackets_in_text = json.dumps({"a": "[" * 1000 + '\\"{' * 1000})
    assert parse_json(brackets_in_text.encode(), "here")
