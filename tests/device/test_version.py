"""Test the order of versions, also of those in hostile files."""

from __future__ import annotations

import pytest
from edgeq_device.engines.catalog import parse_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("1.20", (1, 20)),
        ("1.31.1rc1", (1, 31, 1)),
        ("12.4+cu", (12, 4)),
        ("", ()),
        ("unknown", ()),
        ("１.2", (2,)),
        ("1." + "9" * 5000, (1, 10**18 - 1)),
    ],
)
def test_the_leading_numbers_of_the_parts(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version
