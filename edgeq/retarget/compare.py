"""Two forms of one model on the same made-up inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.engines import DEFAULT, as_engine
from edgeq.errors import CheckFailedError, RuntimeUnavailableError, one_line
from edgeq.graph.quant_params import LIMITS
from edgeq.model.load import model_signature
from edgeq.retarget.params import INTEGERS
from edgeq.session import OptimizationLevel, SessionSettings, open_session
from edgeq.workers.engine import start_engine

USUAL = 0.1
"""Integer operators scale and round in one step what Q/DQ do in two: an integer may come out one off, and later layers
carry that on; in most networks no further than to this share of the largest output."""
_TRIES = 2
_REPORT = "Please report this model"


@dataclass(frozen=True)
class Comparison:
    """Outputs of both models on made-up inputs.

    Attributes:
        identical: to the last bit.
        largest: largest difference, as a share of the output's largest magnitude; infinite where only one of them has
            NaN or infinity.
    """

    identical: bool
    largest: float


def compare(given: Path, rewritten: Path, *, same_operators: bool, branches: bool = False) -> Comparison | None:
    """Both models side by side; where the operators changed too, the closer of what they do with and without ONNX
    Runtime's optimiser, which makes integer operators of Q/DQ pairs itself. None where the given model does not run on
    made-up inputs.

    Args:
        branches: whether the models have control flow, on which the optimiser of some releases ends the process; it is
            tried in one of its own then.

    Raises:
        CheckFailedError: the operators are the same and the outputs are not; or the rewritten model does not run, or
            gives no numbers.
    """
    plain = compare_outputs(given, rewritten)
    if plain is None:
        return None
    if same_operators and not plain.identical:
        raise CheckFailedError(
            f"the rewritten model differs from {given} by {plain.largest:.3g} of its outputs' magnitude",
            _REPORT,
        )
    if plain.largest <= USUAL or (branches and any(_optimised_problem(m, branches) for m in (rewritten, given))):
        return plain
    optimized = compare_outputs(given, rewritten, optimization="all")
    closer = plain if optimized is None or plain.largest <= optimized.largest else optimized
    if not np.isfinite(closer.largest):
        raise CheckFailedError("the rewritten model gives NaN or infinity where the given one does not", _REPORT)
    return closer


def optimiser_problem(given: Path, rewritten: Path, *, branches: bool = False) -> str:
    """Why ONNX Runtime does not run the rewritten model with its optimiser on; "" where it does, or does not run the
    given one either. `branches` as in `compare`."""
    problem = _optimised_problem(rewritten, branches)
    return problem if problem and not _optimised_problem(given, branches) else ""


def _optimised_problem(model: Path, branches: bool) -> str:
    try:
        if not branches:
            return _run(open_session(model), _made_up(model, seed=0))[1]
        with start_engine(as_engine(DEFAULT).engine) as guest:
            return _run(guest.open(model, SessionSettings()), _made_up(model, seed=0))[1]
    except RuntimeUnavailableError as error:
        return error.problem


def compare_outputs(one: Path, other: Path, *, optimization: OptimizationLevel = "none") -> Comparison | None:
    """Run both on the same made-up inputs; None where `one` refuses them.

    Raises:
        CheckFailedError: `other` refuses what `one` takes.
    """
    settings = SessionSettings(optimization=optimization)
    sessions = [open_session(path, settings) for path in (one, other)]
    identical, largest = True, 0.0
    for number in range(_TRIES):
        inputs = _made_up(one, seed=number, free=1 + number)
        wanted, _ = _run(sessions[0], inputs)
        if wanted is None and number:  # a batch, or another size, that is built in
            continue
        if wanted is None:
            return None
        found, problem = _run(sessions[1], inputs)
        if found is None:
            raise CheckFailedError(f"the rewritten model does not run: {problem}", _REPORT)
        for a, b in zip(wanted, found, strict=True):
            same = np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
            identical &= same
            largest = largest if same else max(largest, _difference(a, b))
    return Comparison(identical, largest)


def _difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    finite = np.isfinite(a)
    x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
    return float(np.max(np.abs(x - y), initial=0.0)) / (float(np.max(np.abs(x), initial=0.0)) or 1.0)


def _run(session: Any, inputs: Mapping[str, Any]) -> tuple[list[NDArray[Any]] | None, str]:
    """Outputs, or None and the reason."""
    try:
        return session.run(None, dict(inputs)), ""
    except Exception as error:  # onnxruntime raises a dozen unrelated types here, some of them bare Exception
        return None, one_line(error)


def _made_up(model: Path, *, seed: int, free: int = 1) -> dict[str, Any]:
    """Return noise for numbers, and 1 for indices, masks and lengths, which is valid nearly everywhere. Free sizes are
    `free`."""
    random = np.random.default_rng(seed)
    inputs: dict[str, Any] = {}
    for spec in model_signature(model).inputs:
        shape = [size if isinstance(size, int) else free for size in spec.shape or ()]
        if spec.dtype.kind == "f":
            inputs[spec.name] = random.normal(size=shape).astype(spec.dtype)
        elif spec.dtype.name in INTEGERS:
            low, high = LIMITS[INTEGERS[spec.dtype.name]]
            inputs[spec.name] = random.integers(low, high + 1, shape).astype(spec.dtype)
        else:
            inputs[spec.name] = np.ones(shape, spec.dtype)
    return inputs
