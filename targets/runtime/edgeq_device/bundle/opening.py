"""Open the best variant that really starts and answers correctly, and report why each better one was passed over.

The self-test runs the bundle's vectors and compares each output with the expected one. If an output has values in
several units, such as scores and boxes in pixels, each slice has its own tolerance.

A model for a plug-in engine is opened in a separate process, because the plug-in may be broken or wrong on this device.
The model must pass its self-test there before it is used. If it fails, another variant runs. An engine that TensorRT
compiles for this GPU must also pass the self-test before it is used.
"""

from __future__ import annotations

import math
import os
import stat
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.bundle.manifest import MANIFEST, check_file_names, is_harmless
from edgeq_device.bundle.onnxfile import DTYPES
from edgeq_device.bundle.package import MAIN, Bundle, path_next_to
from edgeq_device.bundle.select import CPU, Choice, Device, select
from edgeq_device.bundle.variants import DRAWN, SliceTolerance, Variant
from edgeq_device.engines.catalog import find_plugin, read_installed_version
from edgeq_device.engines.serve import Guest, GuestSession, build_open_request, build_python_command
from edgeq_device.engines.sessions import PROVIDER, open_session
from edgeq_device.errors import BundleError, CheckFailedError, DataError, OutputError, RuntimeUnavailableError
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.pairs import OutputPair, pair_outputs
from edgeq_device.prepare.arrays import read_arrays, to_array, write_npz
from edgeq_device.system.places import make_draft, move_new
from edgeq_device.trust.signature import SIGNATURE

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
        if not any(array.size for array in expected.values()):
            raise BundleError(f"variant {variant.name}: the self-test {case.outputs.name} compares nothing")
        try:
            results = session.run(names, feeds)
        except RuntimeUnavailableError:  # the process that ran the model has ended
            raise
        except Exception as error:  # onnxruntime's exceptions have no common base
            text = " ".join(str(error).split())
            raise BundleError(f"variant {variant.name}: the self-test does not fit the model ({text})") from error
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
    if actual.dtype.kind == expected.dtype.kind == "U":
        return (0.0, "") if (actual == expected).all() else (float("inf"), "its texts differ")
    if actual.dtype != expected.dtype:
        return float("inf"), f"dtype {actual.dtype} instead of {expected.dtype}"
    if actual.size == 0:
        return 0.0, ""
    if actual.dtype.kind not in "biuf":
        return float("inf"), f"dtype {actual.dtype} cannot be compared"
    actual_values, expected_values = actual.astype(np.float64), expected.astype(np.float64)
    if not np.isfinite(actual_values).all():
        return float("inf"), "it is not finite"
    if not np.isfinite(expected_values).all():
        return float("inf"), "the expected values are not finite"
    return float(np.abs(actual_values - expected_values).max()), ""


Open = Callable[[Variant, int], Any]
ANSWER_S = 120.0
"""Seconds in which a plug-in must open the model or answer a test vector. If it takes longer, it counts as hung, and
another variant runs."""
RUN_S = 3600.0
"""The same limit for a run after the self-test, whose input may be larger."""


@dataclass(frozen=True)
class OpenedVariant:
    """Hold a variant with its session. `passed_over` contains the reason against each better variant."""

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
) -> OpenedVariant:
    """Open the best variant for `device`, or only the variant `name` if that is given.

    Args:
        open_it: function that takes a variant and a number of threads and returns a session. If it fails, the next
            variant is tried. None uses `open_variant`.

    Raises:
        BundleError: no variant fits.
        RuntimeUnavailableError: the variant `name`, or the last one that fits, does not open.
        CheckFailedError: the variant `name` gives wrong answers here.
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
        better = [v for v in choice.rejected if v.variant.rank > choice.variant.rank and not v.fits]
        better.sort(key=lambda verdict: -verdict.variant.rank)
        return OpenedVariant(choice, session, tuple(f"not {v.variant.name}: {'; '.join(v.reasons)}" for v in better))


def open_variant(variant: Variant, threads: int = 0) -> Any:
    """Return a session of `variant`. If a plug-in runs the variant, the session is in a separate process, which ends
    when the session does.

    Raises:
        RuntimeUnavailableError: the variant does not open, or the plug-in crashes or hangs.
        CheckFailedError: the answers of the plug-in or of TensorRT's engine are wrong.
    """
    session = start_variant(variant, threads)
    if isinstance(session, GuestSession):
        _refuse_wrong(variant, session, session.guest.title)
        session.guest.request_s = RUN_S
    elif variant.ep == PROVIDER and variant.cases and "table" not in variant.info:
        # From correct files, TensorRT 8.6.0 built engines that gave wrong answers, so its engines are tested first. A
        # variant with a calibration table is not tested: TensorRT then chooses the precisions itself, and the vectors
        # are those of the float model.
        _refuse_wrong(variant, session, "TensorRT's engine")
    return session


def _refuse_wrong(variant: Variant, session: Any, title: str) -> None:
    if not variant.cases and variant.info.get(DRAWN):  # no output can be compared
        return
    result = run_selftest(variant, session)
    if not result.passed:
        raise CheckFailedError(f"{title} gives wrong results here: {result.reason}")


def start_variant(variant: Variant, threads: int = 0) -> Any:
    """Do the work of `open_variant` without the self-test."""
    engine = find_plugin(variant.ep)
    if engine is None:
        return open_session(variant, threads)
    guest = Guest(
        build_python_command("edgeq_device.engines.serve"),
        os.environ,
        f"{engine.name} {read_installed_version(engine)}",
        request_s=ANSWER_S,
    )
    try:
        session = guest.open_session(build_open_request(variant, threads))
        variant.check_unchanged()
    except BaseException:
        guest.end()
        raise
    weakref.finalize(session, guest.end)
    return session


def read_feeds(session: Any, files: Sequence[str]) -> Dict[str, "np.ndarray[Any, Any]"]:
    """Read the model's inputs from `files`. Each entry is an .npz whose keys are input names, `NAME=FILE.npy`, or a
    plain .npy for a single input.

    Raises:
        DataError: an input is missing, unknown, given twice, or has the wrong dtype or shape.
    """
    input_names = [spec.name for spec in session.get_inputs()]
    feeds: Dict[str, "np.ndarray[Any, Any]"] = {}
    for text in files:
        name, equals, path = text.partition("=")
        if not equals or name not in input_names:
            name, path = "", text
        for key, array in read_arrays(Path(path)).items():
            key = key or name or (input_names[0] if len(input_names) == 1 else "")
            if not key:
                names = ", ".join(input_names)
                raise DataError(f"{path}: the model has several inputs", f"Write NAME={path}, with NAME one of {names}")
            if key in feeds:
                raise DataError(f"{path}: input {key!r} is given twice")
            feeds[key] = array
    check_feeds(session, feeds)
    return feeds


def check_feeds(session: Any, feeds: Mapping[str, "np.ndarray[Any, Any]"]) -> None:
    """Compare the names, dtypes and shapes of `feeds` with the model's inputs. A named size accepts any number.

    Raises:
        DataError: an input is missing or unknown, or has the wrong dtype or shape.
    """
    specs = {spec.name: spec for spec in session.get_inputs()}
    names = ", ".join(specs)
    for name in feeds:
        if name not in specs:
            raise DataError(f"the model has no input {name!r}", f"Its inputs are {names}")
    for name, spec in specs.items():
        if name not in feeds:
            raise DataError(f"input {name!r} is missing", f"The model takes {names}")
        array, dtype = feeds[name], DTYPES.get(spec.type)
        if dtype is not None and array.dtype != np.dtype(dtype):
            raise DataError(f"input {name!r} is {array.dtype}, the model takes {dtype}", "Convert it before saving")
        shape = list(spec.shape)
        fits = len(shape) == array.ndim and all(
            not isinstance(size, int) or size == have for size, have in zip(shape, array.shape)
        )
        # An input of unknown rank looks like a scalar; onnxruntime runs both on any shape.
        if shape and not fits:
            raise DataError(f"input {name!r} has shape {list(array.shape)}, the model takes {shape}")


def choose_output_path(bundle: Bundle, path: Optional[Path]) -> Path:
    """Return the path for outputs: `path`, or one next to the bundle if `path` is None.

    Raises:
        OutputError: the path is the bundle itself, or is inside the bundle and would replace one of its files or make
            the bundle invalid.
    """
    root = bundle.source.resolve()
    path = path_next_to(bundle.source, ".outputs.npz") if path is None else path
    place = path.absolute().parent.resolve() / path.name
    if place == root or (root in place.parents and not _can_join(bundle, place.relative_to(root).as_posix())):
        raise OutputError(f"{path} is in the bundle, and would replace or add to its files", "Write it elsewhere")
    return place


def _can_join(bundle: Bundle, name: str) -> bool:
    """Return whether a file with this relative name may be in the bundle's directory on every system."""
    names = {MANIFEST, SIGNATURE, *bundle.files, *bundle.extra} - {name}
    try:
        check_file_names([*sorted(names), name], str(bundle.source))
    except BundleError:
        return False
    return is_harmless(name) and name not in (MANIFEST, SIGNATURE, *bundle.files)


def save_outputs(path: Path, outputs: Mapping[str, "np.ndarray[Any, Any]"], *, force: bool) -> None:
    """Write `outputs` as an .npz. Either the complete file appears, or no file.

    Raises:
        OutputError: `path` exists (without `force`), is not a regular file (even with `force`), or cannot be written.
    """
    exists_error = OutputError(f"{path} exists already", "Pass --force to replace it, or choose another output")
    try:
        if os.path.lexists(path):
            if not force:
                raise exists_error
            if not stat.S_ISREG(path.lstat().st_mode):  # a rename would replace a device or a link with a file
                raise OutputError(f"{path} is not a regular file, so it is not replaced", "Choose another output")
        with make_draft(path) as draft:
            write_npz(draft, outputs)
            if force:
                draft.replace(path)
            else:
                move_new(draft, path)
    except FileExistsError as error:  # another process was faster
        raise exists_error from error
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror})", "Choose another output") from error
