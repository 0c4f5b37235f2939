"""Compare `edgeq.tuning.recover.nonlinear` with a trial of many ranges on the values themselves."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.calibration.collect import collect
from edgeq.calibration.methods.mse import COARSE, REFINEMENTS
from edgeq.calibration.ranges import Range
from edgeq.calibration.statistics import TensorStatistics, histogram_of, linear_of
from edgeq.model.quant_params import Grid, grid_of
from edgeq.tuning.recover.followers import Followers, Function
from edgeq.tuning.recover.nonlinear import find_range_before
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


def _bins_error(tensor: TensorStatistics, function: Function, grid: Grid, chosen: Range) -> float:
    """Return the squared error after the function, summed over the values, if the bins are quantized with a range."""
    linear = linear_of(tensor.histogram)
    centres, counts = linear.centres()[linear.counts > 0], linear.counts[linear.counts > 0]
    params = grid.params(chosen.low, chosen.high)
    return float(((function(params.fake_quant(centres)) - function(centres)) ** 2 @ counts).sum())


def _try_each(tensor: TensorStatistics, function: Function, grid: Grid) -> Range:
    """Search as `find_range_before` does, but quantize the bins with every range and call the function for each."""
    low, high = min(tensor.minimum, 0.0), max(tensor.maximum, 0.0)
    if grid.symmetric:
        high = max(-low, high)
        low = -high

    def error(pair: tuple[float, float]) -> float:
        return _bins_error(tensor, function, grid, Range(low * pair[0], high * pair[1]))

    def pairs(lows: np.ndarray, highs: np.ndarray) -> list[tuple[float, float]]:
        ends = lows if low < 0 else np.ones(1), highs if high > 0 else np.ones(1)
        return [(b, b) for b in ends[1]] if grid.symmetric else list(itertools.product(*ends))

    best = min(pairs(COARSE, COARSE), key=error)
    for factor in REFINEMENTS:
        around = np.array([1.0, factor, 1.0 / factor])
        best = min(pairs(np.minimum(best[0] * around, 1.0), np.minimum(best[1] * around, 1.0)), key=error)
    return Range(low * best[0], high * best[1])


@settings(max_examples=25)
@given(
    function=st.sampled_from(sorted(FUNCTIONS)),
    kind=st.sampled_from([("uint8", False), ("int8", True), ("int8", False)]),
    scale=st.floats(0.1, 100),
    shift=st.floats(-20, 20),
    seed=st.integers(0, 99),
)
def test_finds_the_range_that_a_trial_of_each_range_finds(
    function: str, kind: tuple[str, bool], scale: float, shift: float, seed: int
) -> None:
    values = (np.random.default_rng(seed).standard_t(4, 2000) * scale + shift).astype(np.float32)
    tensor = TensorStatistics(
        samples=1,
        nonempty=1,
        count=values.size,
        minimum=float(values.min()),
        maximum=float(values.max()),
        histogram=histogram_of(values),
    )
    behind, grid = _follower(*FUNCTIONS[function]), grid_of(*kind)
    found, wanted = find_range_before(tensor, behind, grid), _try_each(tensor, behind, grid)
    assert found is not None
    # Bins at a midpoint between two levels may go to either, so two ranges may change places.
    error, least = (_bins_error(tensor, behind, grid, chosen) for chosen in (found, wanted))
    if error <= least * (1 + 1e-6):
        return
    step = float(1 / REFINEMENTS[-1]) * (1 + 1e-9)
    for end, best in ((found.low, wanted.low), (found.high, wanted.high)):
        assert abs(best) / step <= abs(end) <= abs(best) * step
