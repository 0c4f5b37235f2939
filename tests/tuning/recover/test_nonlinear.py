"""Compare `edgeq.tuning.recover.nonlinear` with a trial of many ranges on the values themselves."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import Range
from edgeq.calibration.statistics import TensorStatistics
from edgeq.model.quant_params import grid_of
from edgeq.tuning.recover.followers import Followers, Function
from edgeq.tuning.recover.nonlinear import find_range_before, join_bins
from tests.tuning.recover.nets import FewSamples, Net, few, prepared_of


def _statistics(folder: Path, samples: FewSamples) -> tuple[TensorStatistics, np.ndarray]:
    net = Net()
    net.node("Identity", ["x"], "y")
    found = collect(prepared_of(net.model({"x": [400]}, ["y"]), folder).model, samples, ["x"])
    return found.tensors["x"], np.concatenate([sample.inputs["x"] for sample in samples]).astype(np.float64)


def _follower(*nodes: tuple[str, list[str], str]) -> Function:
    net = Net()
    for op_type, inputs, output in nodes:
        net.node(op_type, inputs, output)
    followers = Followers(net.model({"x": [1]}, [nodes[-1][2]]))
    return followers.function(followers.find("x"))


SILU = (("Sigmoid", ["x"], "g"), ("Mul", ["x", "g"], "y"))
FUNCTIONS = {"silu": SILU, "sigmoid": SILU[:1], "tanh": (("Tanh", ["x"], "y"),), "relu": (("Relu", ["x"], "y"),)}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("kind", "symmetric"), [("uint8", False), ("int8", True)])
def test_no_range_of_many_is_better(tmp_path: Path, function: str, kind: str, symmetric: bool) -> None:
    samples = FewSamples(
        tuple(type(s)(s.name, {"x": (s.inputs["x"] * 8 - 10).astype(np.float32)}) for s in few(8, [400]))
    )
    tensor, values = _statistics(tmp_path, samples)
    behind, grid = _follower(*FUNCTIONS[function]), grid_of(kind, symmetric)
    wanted = behind(values)

    def error(chosen: Range) -> float:
        return float(((behind(grid.params(chosen.low, chosen.high).fake_quant(values)) - wanted) ** 2).mean())

    found = find_range_before(tensor, behind, grid)
    assert found is not None
    low, high = values.min(), values.max()
    tried = [Range(low * a, high * b) for a, b in itertools.product(np.geomspace(0.02, 1, 14), repeat=2)]
    # The histogram has bins and the candidates are discrete, so the found range is only nearly the best.
    assert error(found) <= 1.2 * min(error(chosen) for chosen in tried)
    assert error(found) <= 0.5 * error(Range(low, high)) or function == "tanh" or symmetric


@pytest.mark.parametrize("op_type", ["Log", "Sqrt"])
def test_a_function_that_is_not_finite_leaves_the_range_alone(tmp_path: Path, op_type: str) -> None:
    tensor, _ = _statistics(tmp_path, few(2, [400]))
    assert find_range_before(tensor, _follower((op_type, ["x"], "y")), grid_of("uint8", False)) is None


def test_zeros_have_no_range(tmp_path: Path) -> None:
    zeros = FewSamples(tuple(type(s)(s.name, {"x": s.inputs["x"] * 0}) for s in few(2, [400])))
    tensor, _ = _statistics(tmp_path, zeros)
    assert find_range_before(tensor, _follower(*SILU), grid_of("uint8", False)) == Range(0.0, 0.0)


@pytest.mark.parametrize("bins", [10, 1024, 1025, 5000])
def test_joined_bins_keep_count_and_mean(bins: int) -> None:
    random = np.random.default_rng(0)
    centres, counts = np.sort(random.normal(size=bins)), random.integers(0, 5, bins).astype(np.float64)
    found, weights = join_bins(centres, counts)
    assert len(found) <= 1024
    assert weights.sum() == counts.sum()
    np.testing.assert_allclose(found @ weights, centres @ counts, rtol=1e-9)
