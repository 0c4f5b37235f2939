"""Compare the division of a selection among files with a plain loop."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from edgeq.data.records import split_indices, update_with_file


@given(st.lists(st.integers(0, 7), max_size=6), st.integers(0, 20), st.integers(1, 5), st.integers(0, 30))
def test_spans(counts: list[int], start: int, step: int, count: int) -> None:
    where = [(number, local) for number, size in enumerate(counts) for local in range(size)]
    indices = range(start, len(where), step)[:count]
    got = [(number, local) for number, part in split_indices(counts, indices) for local in part]
    assert got == [where[i] for i in indices]
    assert [(number, list(part)) for number, part in split_indices(counts, list(indices))] == [
        (number, list(part)) for number, part in split_indices(counts, indices)
    ]


def test_names_that_are_not_utf8_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    digests = []
    for name in ("a\udcff", "a\udcfe", "a\ud800", "a"):
        digest = hashlib.sha256()
        update_with_file(digest, tmp_path / "x", name)
        digests.append(digest.hexdigest())
    assert len(set(digests)) == 4
