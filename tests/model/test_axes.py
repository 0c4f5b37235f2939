"""Test how axes are followed: rows that operators rank, and positions that masks hide."""

from __future__ import annotations

import numpy as np
import pytest
from edgeq_device.measure.basis import Axis

from edgeq.model.axes import ranked_axes
from edgeq.model.graph import GraphIndex
from edgeq.model.padding import find_padding
from edgeq.model.shapes import write_shapes
from tests.graphs import model


def graph(body: str, **weights: object) -> GraphIndex:
    found = model(body, weights)
    write_shapes(found, None)
    return GraphIndex(found)


K, FOUR = np.array([5]), np.array([1, 1, 4])


def test_rows_follow_the_indices_that_choose_them() -> None:
    found = ranked_axes(
        graph(
            """m (float[1, 64] s, float[1, 64, 4] b) => (float[1, 5, 5] y, float[1, 5] v) {
              v, i = TopK <axis = 1> (s, k)
              e = Unsqueeze (i, two)
              t = Tile (e, four)
              g = GatherElements <axis = 1> (b, t)
              u = Unsqueeze (v, two)
              y = Concat <axis = 2> (g, u) }""",
            k=K,
            two=np.array([2]),
            four=FOUR,
        )
    )
    assert found["y"] == found["v"] == Axis(1, "TopK 'v'")


def test_rows_end_in_a_reduction_and_in_a_sum_over_them() -> None:
    found = ranked_axes(
        graph(
            """m (float[1, 64] s, float[64, 8] b) => (float[1, 8] y, float[1, 8] z) {
              v, i = TopK <axis = 1> (s, k)
              g = Gather <axis = 0> (b, i)
              y = ReduceMax <axes = [1], keepdims = 0> (g)
              z3 = MatMul (vu, g)
              vu = Unsqueeze (v, one)
              z = Squeeze (z3, one) }""".replace("z3 = MatMul (vu, g)\n              vu = Unsqueeze (v, one)",
                                                 "vu = Unsqueeze (v, one)\n              z3 = MatMul (vu, g)"),
            k=K,
            one=np.array([1]),
        )
    )  # fmt: skip
    assert found["g"].place == 1
    assert "y" not in found
    assert "z" not in found


def test_selected_boxes_have_no_place() -> None:
    found = ranked_axes(
        graph(
            """m (float[1, 64, 4] b, float[1, 3, 64] s) => (float[n, 4] y) {
              sel = NonMaxSuppression (b, s, most, iou, low)
              col = Gather <axis = 1> (sel, c)
              row = Reshape (col, flat)
              one = Squeeze (b, zero)
              y = Gather <axis = 0> (one, row) }""",
            most=np.array([10]),
            iou=np.array([0.5], np.float32),
            low=np.array([0.1], np.float32),
            c=np.array([2]),
            flat=np.array([-1]),
            zero=np.array([0]),
        )
    )
    assert found["sel"].place == 0
    assert found["y"].place == 0


ATTENTION = """
  q = MatMul (x, wq)
  kt = Transpose <perm = [0, 2, 1]> (x)
  s = MatMul (q, kt)
  {mask}
  p = Softmax <axis = 2> (a)
  y = MatMul (p, x)
"""
ADDED = """m = Cast <to = 1> (mask)
  u = Unsqueeze (m, one)
  r = Sub (unit, u)
  f = Mul (r, far)
  a = Add (s, f)"""
SHIFTED = ADDED.replace("Sub (unit, u)", "Sub (u, unit)").replace("far", "high")
LOGARITHM = "m = Cast <to = 1> (mask)\n u = Unsqueeze (m, one)\n f = Log (u)\n a = Add (s, f)"
SELECTED = "m = Cast <to = 9> (mask)\n u = Unsqueeze (m, one)\n a = Where (u, s, far)"
EQUAL = "m = Equal (mask, zero)\n u = Unsqueeze (m, one)\n a = Where (u, far, s)"
FILLED = "m = Equal (mask, zero)\n u = Unsqueeze (m, one)\n f = Where (u, far, none)\n a = Add (s, f)"
HIDING = "m = Cast <to = 9> (mask)\n u = Unsqueeze (m, one)\n a = Where (u, far, s)"
ADDITIVE = "m = Cast <to = 1> (mask)\n u = Unsqueeze (m, one)\n f = Mul (u, far)\n a = Add (s, f)"


@pytest.mark.parametrize(
    ("mask", "hidden"),
    [(ADDED, False), (SHIFTED, False), (LOGARITHM, False), (SELECTED, False), (EQUAL, False), (FILLED, False),
     (HIDING, True), (ADDITIVE, True)],
)  # fmt: skip
def test_a_mask_is_recognised_by_its_use(mask: str, hidden: bool) -> None:
    padding = find_padding(
        graph(
            f"m (float[n, s, 8] x, int64[n, s] mask) => (float[n, s, 8] y) {{ {ATTENTION.format(mask=mask)} }}",
            wq=np.eye(8, dtype=np.float32),
            one=np.array([1]),
            unit=np.float32(1),
            far=np.float32(-1e9),
            high=np.float32(1e9),
            none=np.float32(0),
            zero=np.int64(0),
        )
    )
    assert dict(padding.masks) == {"mask": hidden}
    assert padding.axes["y"] == Axis(1, "mask")
    assert padding.axes["q"].place == 1


def test_scores_of_one_input_are_not_a_mask() -> None:
    body = ATTENTION.format(mask="a = Add (s, bias)")
    padding = find_padding(
        graph(
            f"m (float[n, s, 8] x) => (float[n, s, 8] y) {{ {body} }}",
            wq=np.eye(8, dtype=np.float32),
            bias=np.float32(1),
        )
    )
    assert not padding.masks
