"""Property tests of the parser of Python literals."""

from __future__ import annotations

import ast
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeq.describe.literals import parse_literal
from edgeq.errors import DataError

SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    SCALARS | st.text(st.characters(exclude_characters="([{"), max_size=20),
    lambda item: (
        st.lists(item, max_size=4)
        | st.tuples(item, item)
        | st.dictionaries(st.integers(0, 999) | st.text("abc", max_size=3), item, max_size=4)
    ),
    max_leaves=6,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list | tuple) else 0


@given(PLAIN)
def test_returns_the_value_of_its_text(value: object) -> None:
    if depth(value) <= 3:
        assert parse_literal(repr(value), "it") == value


@given(st.text("()[]{}'\"\\,:0159e-+.abfjrx_ \n#", max_size=60))
@example("'\\9'")
@settings(max_examples=400)
def test_any_text_gives_what_the_standard_parser_gives_or_an_error(text: str) -> None:
    message = value = None
    try:
        value = parse_literal(text, "it")
    except DataError as error:
        message = error.problem
    if message is not None:
        assert "\n" not in message
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of an escape sequence such as "\\9", and reads it
        assert repr(value) == repr(ast.literal_eval(text.strip()))


@pytest.mark.parametrize(
    "text",
    [
        "{1, 2}",
        "b'a'",
        "1j",
        "1 + 2j",
        "f'{1}'",
        "name",
        "open('x')",
        "[x for x in (1,)]",
        "a.b",
        "a[0]",
        "lambda: 0",
        "{**{}}",
        "[*[1]]",
        "...",
        "-True",
        "not 1",
        "1 if 2 else 3",
        "{[1]: 2}",
        "{(1,): 2}",
        "1; 2",
        "",
        "(",
        "\0",
        "'\ud800",
        "9" * 5000,
        "0x" + "f" * 60_000,
        "[" * 5,
        "[" * 5 + "]" * 5,
        "[" * 100_000 + "]" * 100_000,
        "-" * 100_000 + "1",
        "a" * (1 << 20) + "b",
        "'" + "a" * (1 << 20) + "'",
    ],
    ids=lambda text: text[:12],
)
def test_refuses_what_is_no_plain_value(text: str) -> None:
    with pytest.raises(DataError, match=r"^it "):
        parse_literal(text, "it")


def test_reads_the_names_of_21000_classes() -> None:
    names = {number: f"n{number:08} a name, of several words" for number in range(21_000)}
    assert parse_literal(str(names), "names") == names
