"""Test what reaches a terminal."""

from __future__ import annotations

import json
import unicodedata

import pytest
from edgeq_device.system.relay import json_text, printable
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("conv 1, größer, 猫, 1\u202fms, [red]", "conv 1, größer, 猫, 1\u202fms, [red]"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[2J\x9b31m\x07\x7f", "\\x1b[2J\\x9b31m\\x07\\x7f"),
        ("a\u2028b\u202ec\ud800", "a\\u2028b\\u202ec\\ud800"),
    ],
)
def test_prints_invisible_characters_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_that_moves_a_cursor_is_left(text: str) -> None:
    shown = printable(text)
    assert {unicodedata.category(c) for c in shown}.isdisjoint({"Cc", "Cf", "Cs", "Zl", "Zp"})
    assert shown.splitlines() in ([shown], [])
    printed = json_text({"text": text})
    assert printed.replace("\n", "").isprintable()
    assert json.loads(printed) == {"text": text}
