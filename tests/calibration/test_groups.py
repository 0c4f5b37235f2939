from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgeq.calibration.groups import scale_groups, share_ranges
from edgeq.calibration.ranges import Range
from edgeq.model.load import read_model

from .models import write


def model(path: Path) -> ir.Model:
    weights = {"shape": np.int64([1, -1]), "constant": np.ones((1, 2, 4, 4), np.float32), "sizes": np.int64([1, 1])}
    body = """g (float[1, 2, 4, 4] x, float[2, 3] y) => (float[1, 6, 4, 4] c, float[1, 3] e, float[1, 3] g) {
        a = Relu(x)
        b = MaxPool<kernel_shape = [1, 1]>(a)
        c = Concat<axis = 1>(b, x, constant)
        d, e = Split<axis = 0>(y)
        f = Neg(d)
        g = Reshape(f, shape)
    }"""
    return read_model(write(path, body, weights))


def test_groups_follow_operators_that_only_move_values(tmp_path: Path) -> None:
    assert scale_groups(model(tmp_path / "m.onnx")) == (("a", "b", "c", "x"), ("d", "e", "y"), ("f", "g"))
    assert scale_groups(model(tmp_path / "m.onnx"), ["Concat"]) == (("b", "c", "x"),)


def test_a_group_has_the_range_that_holds_all_of_its_members(tmp_path: Path) -> None:
    ranges = {"a": Range(0, 2), "b": Range(0, 1), "c": Range(-3, 2), "f": Range(-1, 0), "other": Range(-9, 9)}
    shared = share_ranges(model(tmp_path / "m.onnx"), ranges)
    assert {name: shared[name] for name in "abc"} == dict.fromkeys("abc", Range(-3, 2))
    assert shared["f"] == Range(-1, 0)
    assert shared["other"] == Range(-9, 9)
    assert ranges["a"] == Range(0, 2)
    assert set(shared) == set(ranges)


def test_a_join_that_stays_in_float_ties_no_scales(tmp_path: Path) -> None:
    net = model(tmp_path / "m.onnx")
    next(node for node in net.graph if node.op_type == "Concat").name = "join"
    assert scale_groups(net, excluded={"join"}) == (("a", "b"), ("d", "e", "y"), ("f", "g"))
    ranges = {"a": Range(0, 1), "b": Range(0, 1), "c": Range(0, 640), "x": Range(-3, 2)}
    assert share_ranges(net, ranges, excluded={"join"})["b"] == Range(0, 1)
