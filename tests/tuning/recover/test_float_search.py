"""Test `edgeq.tuning.recover.float_search`: it keeps layers in float until the proof finds the outputs close enough."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.hardware.target import Target, resolve
from edgeq.prove.checks import int8_share
from edgeq.tuning.recover.float_search import FloatSearch
from edgeq.tuning.recover.run import Recoverer
from tests.tuning.recover.nets import SCHEME, Net, few, job_of, noise_db, target

pytestmark = pytest.mark.usefixtures("exact_kernels")

SHAPE = [4, 16]


def outliers() -> ir.Model:
    """Return three layers. One channel dominates the tensors around the first activation, but matters little later."""
    net = Net()
    columns = np.ones(16)
    columns[3] = 300.0
    x = net.node("MatMul", ["x", net.constant("w1", net.random.normal(0, 0.25, (16, 16)) * columns)], "wide")
    x = net.node("Relu", [x], "relu")
    x = net.node("MatMul", [x, net.constant("w2", net.random.normal(0, 0.25, (16, 16)) / columns[:, None])], "even")
    x = net.node("Relu", [x], "relu2")
    net.node("MatMul", [x, net.constant("w3", net.random.normal(0, 0.25, (16, 16)))], "y")
    return net.model({"x": SHAPE}, ["y"])


def roots() -> ir.Model:
    """Return two layers around a written-out normalization. In 8 bits the root's input has small negative values."""
    net = Net()
    x = net.node("MatMul", ["x", net.constant("w1", net.random.normal(0, 0.25, (16, 16)))], "in")
    power = net.node("ReduceSum", [net.node("Mul", [x, x], "square")], "power", keepdims=1)
    less = net.node("Sub", [power, net.node("Mul", [power, net.constant("part", 0.99999)], "most")], "less")
    root = net.node("Sqrt", [net.node("Add", [less, net.constant("eps", 1e-9)], "positive")], "root")
    x = net.node("Div", [x, root], "normed")
    net.node("MatMul", [x, net.constant("w3", net.random.normal(0, 0.25, (16, 16)))], "y")
    return net.model({"x": SHAPE}, ["y"])


def _search(
    model: ir.Model, folder: Path, on: Target | None = None, shape: tuple[int, ...] = tuple(SHAPE)
) -> FloatSearch:
    job = job_of(model, folder, few(8, shape), prepare=True)
    place = on or target()
    return FloatSearch(Recoverer(job, place, folder), job, place.profile.scheme if on else SCHEME)


@pytest.mark.parametrize("model", [outliers, roots])
def test_builds_the_form_that_was_judged(model: object, tmp_path: Path) -> None:
    assert callable(model)
    search = _search(model(), tmp_path)
    plain = search.measure((), math.inf)
    wanted = max(30.0, plain + 1)
    found = search.reach(wanted)
    assert found is not None
    built = search.recoverer.build(search.in_float(found), (), tmp_path / "closer.onnx")
    assert noise_db(search.job.prepared.path, built.artifact.model, few(8, SHAPE)) >= wanted - 0.1
    assert int8_share(search.job, built) > 0


def test_a_model_left_in_float_is_no_answer(tmp_path: Path) -> None:
    search = _search(outliers(), tmp_path)
    assert search.reach(300.0) is None
    nodes, best = search.best
    assert 30 < best < 300
    assert int8_share(search.job, search.recoverer.build(search.in_float(nodes), (), tmp_path / "best.onnx")) > 0
    assert search.measure([str(node.name) for node in search.job.prepared.model.graph], 300.0) == -math.inf


def test_a_target_whose_model_has_other_tensors_is_searched_too(tmp_path: Path) -> None:
    net = Net()
    channels = np.ones(8)
    channels[3] = 300.0
    x = net.node("Relu", [net.conv("x", "first", 3, 8, channels=channels)], "first_act")
    weight = net.random.normal(0, 0.3, (8, 8, 1, 1)) / channels[:, None, None]
    x = net.node("Conv", [x, net.constant("w2", weight)], "second")
    net.conv(net.node("Relu", [x], "second_act"), "last", 8, 4, 1)
    search = _search(net.model({"x": [1, 3, 8, 8]}, ["last_out"]), tmp_path, resolve("gemmini"), (1, 3, 8, 8))
    plain = search.measure((), math.inf)
    found = search.reach(plain + 3)
    assert found
    assert search.sqnr_by_nodes[frozenset(found)] >= plain + 3
