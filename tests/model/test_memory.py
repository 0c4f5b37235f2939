from __future__ import annotations

import pytest

from edgeq.model.memory import partitions


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([3, 3, 4, 1], [[3, 3, 4], [1]]),
        ([11, 2, 30, 9], [[11], [2], [30], [9]]),
        ([0, 10, 0], [[0, 10, 0]]),
    ],
)
def test_neighbours_share_a_part_while_they_fit(sizes: list[int], parts: list[list[int]]) -> None:
    assert list(partitions(((size, size) for size in sizes), 10)) == parts
