"""Compare two forms of one model on the same made-up inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import CheckFailedError, RuntimeUnavailableError, one_line
from edgeq.model.load import model_signature
from edgeq.model.quant_params import LIMITS
from edgeq.retargeting.shift import INTEGERS
from edgeq.run.engines import DEFAULT, as_engine
from edgeq.run.session import SessionSettings, open_session, start_engine

USUAL = 0.1
"""Largest usual difference between QDQ and QOperator models, as a share of the largest output. Integer operators scale
and round in one step, but Q/DQ pairs in two. So an integer may differ by one, and later layers pass the difference on.
"""
# The second try has other sizes, which shows constants that fit only the first.
_TRIES = 2
# The optimiser would turn Q/DQ pairs into the integer operators with which they are compared.
_PLAIN = SessionSettings(optimization="none")
_REPORT = "Please report this model"


@dataclass(frozen=True)
class RetargetComparison:
    """Hold the result of comparing the outputs of two models on made-up inputs.

    Attributes:
        identical: whether the outputs are equal to the last bit.
        largest: largest difference, as a share of the output's largest magnitude; infinite if only one of the models
            gives NaN or infinity.
    """

    identical: bool
    largest: float


def compare(
    source: Path, rewritten: Path, *, same_operators: bool, default: RetargetComparison | None = None
) -> RetargetComparison | None:
    """Compare the outputs of both models without ONNX Runtime's optimiser. Return None if the model `source` does not
    run on made-up inputs.

    Args:
        default: the result of `compare_by_default`.

    Raises:
        CheckFailedError: the operators are the same but the outputs differ; or the rewritten model does not run, or
            gives NaN or infinity with and without the optimiser.
    """
    unoptimised = compare_outputs(source, rewritten)
    if unoptimised is None:
        return None
    if same_operators and not unoptimised.identical:
        raise CheckFailedError(
            f"the rewritten model differs from {source} by {unoptimised.largest:.3g} of its outputs' magnitude",
            _REPORT,
        )
    # The optimiser alone may cause NaN, so one finite comparison is enough.
    if not np.isfinite([comparison.largest for comparison in (unoptimised, default) if comparison is not None]).any():
        raise CheckFailedError("the rewritten model gives NaN or infinity where the given one does not", _REPORT)
    return unoptimised


def compare_by_default(
    source: Path, rewritten: Path, options: Mapping[str, str], *, branches: bool = False
) -> tuple[RetargetComparison | None, str]:
    """Compare the outputs of both models in ONNX Runtime's default session, with its optimiser.

    Args:
        options: session options that the rewritten model needs.
        branches: whether the models have control flow. On such models, the optimiser of some releases crashes the
            process, so edgeq first tries it in a separate process.

    Returns:
        The result and "". If a model does not run, None and the reason; the reason is "" if `source` does not run.
    """
    settings = SessionSettings(), SessionSettings(config=options)
    problems = [_find_run_problem(*pair, branches) for pair in zip((source, rewritten), settings, strict=True)]
    if any(problems):
        return None, "" if problems[0] else problems[1]
    return compare_outputs(source, rewritten, settings), ""


def _find_run_problem(model: Path, settings: SessionSettings, branches: bool) -> str:
    try:
        if not branches:
            return _run(open_session(model, settings), made_up_inputs(model, seed=0))[1]
        with start_engine(as_engine(DEFAULT).engine) as guest:
            return _run(guest.open(model, settings), made_up_inputs(model, seed=0))[1]
    except RuntimeUnavailableError as error:
        return error.problem


def compare_outputs(
    reference: Path, candidate: Path, settings: tuple[SessionSettings, SessionSettings] = (_PLAIN, _PLAIN)
) -> RetargetComparison | None:
    """Run both models, each with its settings, on the same made-up inputs, and compare their outputs. Return None if
    `reference` refuses the inputs. By default, ONNX Runtime's optimiser is off.

    Raises:
        CheckFailedError: `candidate` refuses inputs that `reference` accepts.
    """
    sessions = [open_session(*pair) for pair in zip((reference, candidate), settings, strict=True)]
    return compare_sessions(reference, *sessions)


def compare_sessions(path: Path, reference: Any, candidate: Any) -> RetargetComparison | None:
    """Compare the outputs of two sessions on made-up inputs of the model `path`. See `compare_outputs`."""
    identical, largest = True, 0.0
    for number in range(_TRIES):
        inputs = made_up_inputs(path, seed=number, free=1 + number)
        expected, _ = _run(reference, inputs)
        if expected is None and number:  # the model fixes the batch size or another size internally
            continue
        if expected is None:
            return None
        outputs, problem = _run(candidate, inputs)
        if outputs is None:
            raise CheckFailedError(f"the rewritten model does not run: {problem}", _REPORT)
        for a, b in zip(expected, outputs, strict=True):
            equal = np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
            identical &= equal
            largest = largest if equal else max(largest, _difference(a, b))
    return RetargetComparison(identical, largest)


def _difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    finite = np.isfinite(a)
    x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
    # Outputs that are zero everywhere have no magnitude to divide by.
    return float(np.max(np.abs(x - y), initial=0.0)) / (float(np.max(np.abs(x), initial=0.0)) or 1.0)


def _run(session: Any, inputs: Mapping[str, Any]) -> tuple[list[NDArray[Any]] | None, str]:
    """Return the outputs and "", or None and the reason for the failure."""
    try:
        return session.run(None, dict(inputs)), ""
    except Exception as error:  # onnxruntime raises a dozen unrelated types here, and sometimes a bare Exception
        return None, one_line(error)


def made_up_inputs(model: Path, *, seed: int, free: int = 1) -> dict[str, Any]:
    """Return noise for float inputs and 8-bit inputs. Other inputs are indices, masks or lengths and become 1, which is
    nearly always valid. Open sizes become `free`.
    """
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
