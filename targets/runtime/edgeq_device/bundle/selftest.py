"""Run the self-test of a variant: run its vectors in a session, and compare each output with the expected one.

If an output has values in several units, such as scores and boxes in pixels, each slice has its own tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Dict, Iterable, Iterator, Mapping, Sequence, Tuple

import numpy as np

from edgeq_device.engines.variant import SliceTolerance, Variant
from edgeq_device.errors import BundleError, RuntimeUnavailableError
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.pairs import OutputPair, pair_outputs
from edgeq_device.prepare.arrays import read_arrays, to_array

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
Slices = Mapping[str, Sequence[SliceTolerance]]
_NO_SLICES: Slices = MappingProxyType({})


@dataclass(frozen=True)
class OutputCheck:
    """Hold the comparison of one output, or of a slice of it, over all cases.

    Attributes:
        name: name of the output, followed by the position of the slice.
        max_abs_error: largest absolute difference; infinite if shape or dtype differ, or values are not finite.
        problem: description of a difference in anything but the values; "" if there is none.
        tolerance: allowed absolute difference.
    """

    name: str
    max_abs_error: float
    problem: str
    tolerance: float

    @property
    def passed(self) -> bool:
        """Return whether shape and dtype agree and the error is within the tolerance."""
        return not self.problem and self.max_abs_error <= self.tolerance

    def to_dict(self) -> Dict[str, Any]:
        """Return plain JSON values. An infinite number becomes None."""
        error, allowed = (value if math.isfinite(value) else None for value in (self.max_abs_error, self.tolerance))
        return {"max_abs_error": error, "tolerance": allowed, "passed": self.passed, "problem": self.problem}


@dataclass(frozen=True)
class SelfTestResult:
    """Hold the result of a self-test. If the bundle has no vectors, there are no outputs, and `passed` is False."""

    cases: int
    outputs: Tuple[OutputCheck, ...]

    @property
    def passed(self) -> bool:
        """Return whether there is at least one case with an output to compare, and every output passed."""
        return self.cases > 0 and bool(self.outputs) and all(check.passed for check in self.outputs)

    @property
    def reason(self) -> str:
        """Return why the self-test did not pass, or "" if it did."""
        if not self.outputs:
            return "it has no self-test"
        return "; ".join(
            f"output {check.name}: {check.problem or f'error {check.max_abs_error:.6g} is over {check.tolerance:.6g}'}"
            for check in self.outputs
            if not check.passed
        )


def run_selftest(variant: Variant, session: Any) -> SelfTestResult:
    """Run every case of `variant` in `session` and compare each expected output.

    Raises:
        BundleError: the vectors do not fit the model.
        RuntimeUnavailableError: the process that runs the model has crashed or hangs.
        DataError: the vectors cannot be read.
    """
    outputs = check_outputs(_run_cases(variant, session), variant.tolerance, variant.slices, variant.basis)
    return SelfTestResult(len(variant.cases), outputs)


def _run_cases(variant: Variant, session: Any) -> Iterator[Tuple[Arrays, Arrays, Arrays]]:
    """Yield the session's outputs, the expected outputs and the inputs of each case."""
    for case in variant.cases:
        feeds, expected = read_arrays(case.inputs), read_arrays(case.outputs)
        names = sorted(expected)
        # A comparison of nothing would pass everywhere.
        if not any(array.size for array in expected.values()):
            raise BundleError(f"variant {variant.name}: the self-test {case.outputs.name} compares nothing")
        try:
            results = session.run(names, feeds)
        except RuntimeUnavailableError:  # the process that ran the model has ended
            raise
        except Exception as error:  # onnxruntime's exceptions have no common base
            text = " ".join(str(error).split())
            raise BundleError(f"variant {variant.name}: the self-test does not fit the model ({text})") from error
        # Without a tolerance, no error would be too large.
        unbounded = next((name for name in names if name not in variant.tolerance), None)
        if unbounded is not None:
            raise BundleError(f"variant {variant.name}: the self-test has no tolerance for output {unbounded!r}")
        yield dict(zip(names, map(to_array, results))), expected, feeds


LEAST_ROWS = 0.5
"""Share of the rows without a fixed place that must be found again. Scores that are almost equal change places with the
rounding, but a working model finds most of its own detections."""


def check_outputs(
    answers: Iterable[Tuple[Arrays, Arrays, Arrays]],
    tolerance: Mapping[str, float],
    slices: Slices = _NO_SLICES,
    basis: Basis = EVERYTHING,
) -> Tuple[OutputCheck, ...]:
    """Check each output over all cases. The results are sorted by name, and each output is followed by its slices.

    Args:
        answers: the outputs, the expected outputs and the inputs for each case, all by name.
        tolerance: tolerance of every output.
        slices: tolerances of slices, keyed by the output's name; outputs without slices are absent.
        basis: what the tolerances apply to.
    """
    checks: Dict[Tuple[str, int], OutputCheck] = {}
    for outputs, expected, inputs in answers:
        pairs = {pair.name: pair for pair in pair_outputs(basis, expected, outputs, inputs)}
        for name, output in outputs.items():
            actual, target, problem = _mask_uncounted(pairs[name]) if name in pairs else (output, expected[name], "")
            error, difference = compare_arrays(actual, target)
            output_checks = [OutputCheck(name, error, problem or difference, tolerance[name])]
            for part in slices.get(name, ()):
                error, problem = _compare_slice(actual, target, part)
                output_checks.append(OutputCheck(f"{name}, {part.name}", error, problem, part.tolerance))
            for place, check in enumerate(output_checks):
                # The report has one line for each output, so keep its worst case.
                earlier = checks.get((name, place), check)
                worse = replace(check, max_abs_error=max(check.max_abs_error, earlier.max_abs_error))
                checks[name, place] = replace(worse, problem=earlier.problem or check.problem)
    return tuple(checks[key] for key in sorted(checks))


def _mask_uncounted(pair: OutputPair) -> Tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", str]:
    """Return the output and the expected output with zeros in place of the elements that do not count, and a
    description of what cannot be compared ("" if there is nothing).
    """
    actual, expected = pair.candidate, pair.reference
    if pair.mask is not None and actual.shape == expected.shape:
        zero = expected.dtype.type(0)
        # A NaN or an infinity of one side alone stays, and fails the check.
        left_out = ~pair.mask & (np.isfinite(actual) | ~np.isfinite(expected))
        actual, expected = np.where(left_out, zero, actual), np.where(left_out, zero, expected)
    if pair.strays:
        return actual, expected, f"{pair.strays} elements mean nothing on one side alone"
    if pair.rows and pair.rows_found < LEAST_ROWS * pair.rows:
        return actual, expected, f"only {pair.rows_found} of {pair.rows} rows are those expected"
    return actual, expected, ""


def _compare_slice(
    actual: "np.ndarray[Any, Any]", expected: "np.ndarray[Any, Any]", part: SliceTolerance
) -> Tuple[float, str]:
    if part.axis >= expected.ndim or part.last >= expected.shape[part.axis]:
        return float("inf"), f"there is no such part of shape {expected.shape}"
    if actual.shape != expected.shape:
        return compare_arrays(actual, expected)
    place = (slice(None),) * part.axis + (slice(part.first, part.last + 1),)
    return compare_arrays(actual[place], expected[place])


def compare_arrays(actual: "np.ndarray[Any, Any]", expected: "np.ndarray[Any, Any]") -> Tuple[float, str]:
    """Return the largest absolute difference in float64, and a description of any other difference ("" if there is
    none).
    """
    if actual.shape != expected.shape:
        return float("inf"), f"shape {actual.shape} instead of {expected.shape}"
    # Text types differ in their length even if the texts are equal.
    if actual.dtype.kind == expected.dtype.kind == "U":
        return (0.0, "") if (actual == expected).all() else (float("inf"), "its texts differ")
    if actual.dtype != expected.dtype:
        return float("inf"), f"dtype {actual.dtype} instead of {expected.dtype}"
    if actual.size == 0:
        return 0.0, ""
    if actual.dtype.kind not in "biuf":
        return float("inf"), f"dtype {actual.dtype} cannot be compared"
    # Unsigned integers would wrap around in a subtraction.
    actual_values, expected_values = actual.astype(np.float64), expected.astype(np.float64)
    if not np.isfinite(actual_values).all():
        return float("inf"), "it is not finite"
    if not np.isfinite(expected_values).all():
        return float("inf"), "the expected values are not finite"
    return float(np.abs(actual_values - expected_values).max()), ""
