from __future__ import annotations

import pytest

from edgeq.model.graph import geometry
from tests.graphs import model


@pytest.mark.parametrize(
    ("attributes", "pads"),
    [
        ("strides = [2, 2]", ((0, 0), (0, 0))),
        ("pads = [1, 2, 3, 4]", ((1, 3), (2, 4))),
        ('auto_pad = "VALID"', ((0, 0), (0, 0))),
        # For 6 rows and columns with strides of 2, three windows of 3 x 2 cover 7 rows and 6 columns.
        ('auto_pad = "SAME_UPPER", strides = [2, 2]', ((0, 1), (0, 0))),
        ('auto_pad = "SAME_LOWER", strides = [2, 2]', ((1, 0), (0, 0))),
        ('auto_pad = "SAME_UPPER", dilations = [2, 1]', ((2, 2), (0, 1))),
    ],
)
def test_padding_is_worked_out(attributes: str, pads: tuple[tuple[int, int], ...]) -> None:
    net = model(f"net (float[1,2,6,6] x, float[2,1,3,2] w) => (y) {{ y = Conv <group = 2, {attributes}> (x, w) }}")
    found = geometry(net.graph[0], (6, 6), (3, 2))
    assert (found.pads, found.group) == (pads, 2)
