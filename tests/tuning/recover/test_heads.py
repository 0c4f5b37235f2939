"""Test the float head: tails that join boxes and scores are found by their structure; other joins are not found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from edgeq.calibration.ranges import Range
from edgeq.measure.kernel_times import kernel_times
from edgeq.tuning.recover.methods.float_head import find_heads
from edgeq.tuning.recover.run import Recoverer
from tests.tuning.recover.nets import SCHEME, Net, few, job_of, run, target

SHAPE = [1, 3, 16, 16]


def _head(*, wide: float = 200.0, after: str = "") -> ir.Model:
    """Return two scales with boxes and scores, joined by Concat, Reshape, Concat and Transpose, as detectors do."""
    net = Net()
    parts = []
    for scale, stride in (("a", 1), ("b", 2)):
        x = net.node("Relu", [net.conv("x", f"{scale}_stem", 3, 8, 3, strides=[stride] * 2)], f"{scale}_r")
        boxes = net.conv(x, f"{scale}_boxes", 8, 4, 1, channels=wide)
        scores = net.node("Sigmoid", [net.conv(x, f"{scale}_scores", 8, 3, 1)], f"{scale}_p")
        net.node("Concat", [boxes, scores], f"{scale}_join", axis=1)
        net.weights.append(numpy_helper.from_array(np.array([1, 7, -1]), f"{scale}_shape"))
        net.node("Reshape", [f"{scale}_join", f"{scale}_shape"], f"{scale}_flat")
        parts.append(f"{scale}_flat")
    net.node("Transpose", [net.node("Concat", parts, "all", axis=2)], "y", perm=[0, 2, 1])
    if after:
        net.node(after, ["y"], "z", **({"axis": 1} if after == "Softmax" else {}))
    return net.model({"x": SHAPE}, ["z" if after else "y"])


TAIL = {
    f"{scale}_{name}"
    for scale in "ab"
    for name in ("p_Sigmoid", "join_Concat", "flat_Reshape")
} | {"all_Concat", "y_Transpose"}  # fmt: skip


def _found(folder: Path, model: ir.Model) -> tuple[str, ...]:
    state = Recoverer(job_of(model, folder, few(2, SHAPE)), target(), folder).state(SCHEME, [], folder / "q.onnx")
    return find_heads(model, state.ranges)


def test_boxes_and_scores_in_one_tensor(tmp_path: Path) -> None:
    assert set(_found(tmp_path, _head())) == TAIL


def test_parts_of_one_size_are_no_head(tmp_path: Path) -> None:
    assert _found(tmp_path, _head(wide=0.1)) == ()


def test_a_join_inside_the_network_is_no_head(tmp_path: Path) -> None:
    """A join inside the network is not a head, because a later operator needs it in integers."""
    assert _found(tmp_path, _head(after="Softmax")) == ()


@pytest.mark.parametrize("op_type", ["Softmax", "MaxPool"])
def test_computing_operators_end_the_tail(op_type: str) -> None:
    net = Net()
    net.node("Concat", ["x", "w"], "joined", axis=1)
    net.node(op_type, ["joined"], "y", **({"kernel_shape": [1, 1]} if op_type == "MaxPool" else {}))
    model = net.model({"x": SHAPE, "w": SHAPE}, ["y"])
    assert find_heads(model, {"x": Range(0.0, 1.0), "w": Range(0.0, 100.0)}) == ()


def test_an_ordinary_join_of_features_is_no_head(tmp_path: Path) -> None:
    """A join of features, as in an Inception block, is not a head, even if it is an output."""
    net = Net()
    parts = [net.node("Relu", [net.conv("x", f"branch{i}", 3, 4, 3)], f"r{i}") for i in range(3)]
    net.node("Concat", parts, "y", axis=1)
    assert _found(tmp_path, net.model({"x": SHAPE}, ["y"])) == ()


def test_scores_that_something_else_reads_stay(tmp_path: Path) -> None:
    net = Net()
    boxes = net.conv("x", "boxes", 3, 4, 1, channels=300.0)
    scores = net.node("Sigmoid", [net.conv("x", "scores", 3, 4, 1)], "p")
    net.node("Concat", [boxes, scores], "y", axis=1)
    net.conv("p", "more", 4, 2, 1)
    assert _found(tmp_path, net.model({"x": SHAPE}, ["y", "more_out"])) == ("y_Concat",)


def test_activations_of_several_nodes_belong_to_the_tail(tmp_path: Path) -> None:
    net = Net()
    net.silu(net.conv("x", "boxes", 3, 4, 1, channels=300.0), "b")
    net.node("Concat", ["b", net.conv("x", "scores", 3, 4, 1)], "y", axis=1)
    found = _found(tmp_path, net.model({"x": SHAPE}, ["y"]))
    assert found == ("b_gate_Sigmoid", "b_Mul", "y_Concat")


def test_shapes_that_are_computed_are_no_data() -> None:
    net = Net()
    net.node("Shape", ["x"], "size")
    net.weights.append(numpy_helper.from_array(np.array([-1]), "minus"))
    net.node("Concat", ["size", "minus"], "shape", axis=0)
    net.node("Reshape", ["x", "shape"], "y")
    model = net.model({"x": SHAPE}, ["y"])
    assert find_heads(model, {"size": Range(0.0, 1.0), "minus": Range(-100.0, 0.0)}) == ()


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_scores_gain_and_the_tail_runs_in_float(tmp_path: Path, form: str) -> None:
    model, samples = _head(), few(4, SHAPE)
    recoverer = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path)
    errors = {}
    for names in ((), ("float-head",)):
        built = recoverer.build(SCHEME.replace(format=form), names, tmp_path / "q.onnx")
        feed = dict(few(1, SHAPE, seed=2).samples[0].inputs)
        reference, made = run(model, feed)[0], run(built.artifact.model, feed, config=built.artifact.session_options)[0]
        errors[names] = np.sqrt(((made - reference)[..., 4:] ** 2).mean())
        kernels = kernel_times(built.artifact.model, built.artifact.settings(threads=1), feed, model, runs=1)
        kinds = {kernel.op_type: kernel.kind for kernel in kernels if kernel.op_type.endswith("Concat")}
        assert kinds == ({"Concat": "float"} if names else dict.fromkeys(kinds, "int8"))
        convs = [kernel.kind for kernel in kernels if "Conv" in kernel.op_type]
        assert convs == ["int8"] * 6
    assert errors[("float-head",)] < 0.1 * errors[()]
