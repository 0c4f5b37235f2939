"""Open the best variant that really starts and answers right, and say why each better one was passed over.

The self-test runs the bundle's vectors and compares each output with what it must be. Where an output has values of
several units, scores and boxes in pixels, each slice has a tolerance of its own.

What a plug-in engine runs is opened in a process of its own, and used after its self-test held there: the plug-in may
be broken or wrong on this device, and then another variant runs.
"""

from __future__ import annotations

import math
import os
import weakref
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.arrays import one_array, read_arrays
from edgeq_device.engines import installed_version, plugin_of
from edgeq_device.errors import BundleError, CheckFailedError, RuntimeUnavailableError
from edgeq_device.package import MAIN, Bundle
from edgeq_device.select import CPU, Choice, Device, precision_of, select
from edgeq_device.serve import Guest, GuestSession, open_request, python_command
from edgeq_device.sessions import open_session
from edgeq_device.variants import SliceTolerance, Variant

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
Slices = Mapping[str, Sequence[SliceTolerance]]
_NO_SLICES: Slices = MappingProxyType({})


@dataclass(frozen=True)
class OutputCheck:
    """One output over all cases, or a slice of one.

    Attributes:
        name: of the output, and the place of the slice.
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
    outputs = check_outputs(_answers(variant, session), variant.tolerance, variant.slices)
    return SelfTest(len(variant.cases), outputs)


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
        yield dict(zip(names, map(one_array, results))), expected


def check_outputs(
    answers: Iterable[Tuple[Arrays, Arrays]], tolerance: Mapping[str, float], slices: Slices = _NO_SLICES
) -> Tuple[OutputCheck, ...]:
    """Each output over all cases, sorted by name, and after it its slices.

    Args:
        answers: of each case, the outputs by name, and those that are expected.
        tolerance: of every output.
        slices: of outputs that have some.
    """
    checks: Dict[Tuple[str, int], OutputCheck] = {}
    for outputs, expected in answers:
        for name, found in outputs.items():
            one = [_check(name, compare(found, expected[name]), tolerance[name])]
            for part in slices.get(name, ()):
                one.append(_check(f"{name}, {part.where}", _compare_slice(found, expected[name], part), part.tolerance))
            for place, check in enumerate(one):
                before = checks.get((name, place), check)
                worse = replace(check, max_error=max(check.max_error, before.max_error))
                checks[name, place] = replace(worse, problem=before.problem or check.problem)
    return tuple(checks[key] for key in sorted(checks))


def _check(name: str, compared: Tuple[float, str], tolerance: float) -> OutputCheck:
    error, problem = compared
    return OutputCheck(name, error, tolerance, problem)


def _compare_slice(
    found: "np.ndarray[Any, Any]", expected: "np.ndarray[Any, Any]", part: SliceTolerance
) -> Tuple[float, str]:
    if part.axis >= expected.ndim or part.last >= expected.shape[part.axis]:
        return float("inf"), f"there is no such part of shape {expected.shape}"
    if found.shape != expected.shape:
        return compare(found, expected)
    place = (slice(None),) * part.axis + (slice(part.first, part.last + 1),)
    return compare(found[place], expected[place])


def compare(found: "np.ndarray[Any, Any]", expected: "np.ndarray[Any, Any]") -> Tuple[float, str]:
    """Largest absolute difference in float64, and what else differs ("" if nothing does)."""
    if found.shape != expected.shape:
        return float("inf"), f"shape {found.shape} where {expected.shape} is expected"
    if found.dtype.kind == expected.dtype.kind == "U":
        return (0.0, "") if (found == expected).all() else (float("inf"), "its texts are others")
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


Open = Callable[[Variant, int], Any]
ANSWER_S = 120.0
"""A plug-in that has not opened the model, or answered a test vector, by then hangs: another variant runs."""
RUN_S = 3600.0
"""The same for a run after the self-test, whose input may be larger."""


@dataclass(frozen=True)
class Opened:
    """A variant with its session. `passed_over` says, for each better variant, why it is not this one."""

    choice: Choice
    session: Any
    passed_over: Tuple[str, ...]


def open_best(
    bundle: Bundle,
    device: Device,
    *,
    component: str = MAIN,
    name: Optional[str] = None,
    threads: int = 0,
    open_it: Optional[Open] = None,
) -> Opened:
    """Open the best variant for `device`; with `name`, that one and no other.

    Args:
        open_it: what must succeed with a variant and a number of threads; its result is the session. None opens it.

    Raises:
        BundleError: none fits.
        RuntimeUnavailableError: the one that was asked for, or the last that fits, does not open.
        CheckFailedError: the one that was asked for runs in a plug-in whose answers are wrong.
    """
    failed: Dict[str, str] = {}
    while True:
        choice = select(bundle, device, component, name, failed=failed)
        try:
            session = (open_it or open_variant)(choice.variant, threads)
        except (RuntimeUnavailableError, CheckFailedError) as error:
            if name is not None or choice.variant.ep == CPU:
                raise
            failed[choice.variant.name] = str(error)
            continue
        return Opened(choice, session, passed_over(choice))


def open_variant(variant: Variant, threads: int = 0) -> Any:
    """A session of `variant`; where a plug-in runs it, in a process of its own that ends with the session.

    Raises:
        RuntimeUnavailableError: it does not open; the plug-in crashes or hangs.
        CheckFailedError: the plug-in's answers are wrong.
    """
    session = start_variant(variant, threads)
    if isinstance(session, GuestSession):
        found = run_selftest(variant, session)
        if not found.passed:
            raise CheckFailedError(f"{session.guest.title} is not right here: {found.reason}")
        session.guest.request_s = RUN_S
    return session


def start_variant(variant: Variant, threads: int = 0) -> Any:
    """`open_variant` without the self-test."""
    engine = plugin_of(variant.ep)
    if engine is None:
        return open_session(variant, threads)
    guest = Guest(
        python_command(f"{__package__}.serve"),
        os.environ,
        f"{engine.name} {installed_version(engine)}",
        request_s=ANSWER_S,
    )
    try:
        session = guest.opened(open_request(variant, threads, precision_of(variant, engine)))
        variant.check_unchanged()
    except BaseException:
        guest.end()
        raise
    weakref.finalize(session, guest.end)
    return session


def passed_over(choice: Choice) -> Tuple[str, ...]:
    """Why each variant that ranks above the chosen one is not it."""
    better = [verdict for verdict in choice.others if verdict.variant.rank > choice.variant.rank and not verdict.fits]
    ordered = sorted(better, key=lambda verdict: -verdict.variant.rank)
    return tuple(f"not {verdict.variant.name}: {'; '.join(verdict.reasons)}" for verdict in ordered)
