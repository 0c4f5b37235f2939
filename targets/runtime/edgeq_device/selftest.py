"""The self-test: run the bundle's vectors and hold each output against what it must be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, Mapping, Tuple

import numpy as np

from edgeq_device.arrays import read_arrays
from edgeq_device.errors import BundleError, RuntimeUnavailableError
from edgeq_device.variants import Variant

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class OutputCheck:
    """One output over all cases.

    Attributes:
        max_error: largest absolute difference; infinite where shape, dtype or finiteness differ.
        tolerance: what is allowed, absolute.
        problem: "" or what differs besides the values.
    """

    name: str
    max_error: float
    tolerance: float
    problem: str

    @property
    def passed(self) -> bool:
        """Whether shape and dtype agree and the error is within the tolerance."""
        return not self.problem and self.max_error <= self.tolerance

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON values; what is infinite is null."""
        error, allowed = (value if math.isfinite(value) else None for value in (self.max_error, self.tolerance))
        return {"max_error": error, "tolerance": allowed, "passed": self.passed, "problem": self.problem}


@dataclass(frozen=True)
class SelfTest:
    """The verdict: a bundle without vectors has no outputs here and does not pass."""

    cases: int
    outputs: Tuple[OutputCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether there is at least one case that compares something, and every output passed."""
        return self.cases > 0 and bool(self.outputs) and all(check.passed for check in self.outputs)

    @property
    def reason(self) -> str:
        """Why it did not pass; "" where it did."""
        if not self.outputs:
            return "it brings no self-test"
        return "; ".join(
            f"output {check.name}: {check.problem or f'error {check.max_error:.6g} is over {check.tolerance:.6g}'}"
            for check in self.outputs
            if not check.passed
        )


def run_selftest(variant: Variant, session: Any) -> SelfTest:
    """Run every case of `variant` in `session` and compare each expected output.

    Raises:
        BundleError: vectors that do not fit the model.
        RuntimeUnavailableError: the process that runs it crashed or hangs.
        DataError: vectors that cannot be read.
    """
    return SelfTest(len(variant.cases), check_outputs(_answers(variant, session), variant.tolerance))


def _answers(variant: Variant, session: Any) -> Iterator[Tuple[Arrays, Arrays]]:
    """What the session gives for each case, and what is expected."""
    for case in variant.cases:
        feeds, expected = read_arrays(case.inputs), read_arrays(case.outputs)
        names = sorted(expected)
        if not any(array.size for array in expected.values()):
            raise BundleError(f"variant {variant.name}: the self-test {case.outputs.name} compares nothing")
        try:
            results = session.run(names, feeds)
        except RuntimeUnavailableError:  # the process that ran it has ended
            raise
        except Exception as error:  # onnxruntime's exceptions have no common base
            text = " ".join(str(error).split())
            raise BundleError(f"variant {variant.name}: the self-test does not fit the model ({text})") from error
        unbounded = next((name for name in names if name not in variant.tolerance), None)
        if unbounded is not None:
            raise BundleError(f"variant {variant.name}: the self-test has no tolerance for output {unbounded!r}")
        yield dict(zip(names, map(np.asarray, results))), expected


def check_outputs(answers: Iterable[Tuple[Arrays, Arrays]], tolerance: Mapping[str, float]) -> Tuple[OutputCheck, ...]:
    """Each output over all cases, sorted by name.

    Args:
        answers: of each case, the outputs by name, and those that are expected.
        tolerance: of every output.
    """
    worst: Dict[str, float] = {}
    problems: Dict[str, str] = {}
    for outputs, expected in answers:
        for name, found in outputs.items():
            error, problem = compare(found, expected[name])
            worst[name] = max(worst.get(name, 0.0), error)
            if problem:
                problems.setdefault(name, problem)
    return tuple(OutputCheck(name, worst[name], tolerance[name], problems.get(name, "")) for name in sorted(worst))


def compare(found: "np.ndarray[Any, Any]", expected: "np.ndarray[Any, Any]") -> Tuple[float, str]:
    """Largest absolute difference in float64, and what else differs ("" if nothing does)."""
    if found.shape != expected.shape:
        return float("inf"), f"shape {found.shape} where {expected.shape} is expected"
    if found.dtype != expected.dtype:
        return float("inf"), f"dtype {found.dtype} where {expected.dtype} is expected"
    if found.size == 0:
        return 0.0, ""
    if found.dtype.kind not in "biuf":
        return float("inf"), f"dtype {found.dtype} cannot be compared"
    left, right = found.astype(np.float64), expected.astype(np.float64)
    if not np.isfinite(left).all():
        return float("inf"), "it is not finite"
    if not np.isfinite(right).all():
        return float("inf"), "the expected values are not finite"
    return float(np.abs(left - right).max()), ""
