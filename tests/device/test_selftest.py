"""Test the verdict of the self-test, output by output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgeq_device.bundle.opening import SelfTestResult, compare, run_selftest
from edgeq_device.bundle.variants import SliceTolerance
from edgeq_device.errors import BundleError

from .fakes import Session, case, variant

INPUT = [[1, 2, 3]]
RIGHT = np.array([[2, 4, 6]], np.float32)


def test_errors_within_the_tolerance_pass(tmp_path: Path) -> None:
    tested = variant(cases=(case(tmp_path, INPUT, RIGHT + np.float32(0.25)),), tolerance={"y": 0.25})
    result = run_selftest(tested, Session())
    assert result.passed
    assert result.outputs[0].max_abs_error == 0.25


def test_errors_over_the_tolerance_fail(tmp_path: Path) -> None:
    tested = variant(cases=(case(tmp_path, INPUT, RIGHT + np.float32(0.25)),), tolerance={"y": 0.125})
    result = run_selftest(tested, Session())
    assert not result.passed
    assert not result.outputs[0].passed


def test_the_worst_case_counts(tmp_path: Path) -> None:
    cases = []
    for name, error in (("a", 0.5), ("b", 0.0)):
        (tmp_path / name).mkdir()
        cases.append(case(tmp_path / name, INPUT, RIGHT + np.float32(error)))
    result = run_selftest(variant(cases=tuple(cases), tolerance={"y": 0.1}), Session())
    assert result.cases == 2
    assert result.outputs[0].max_abs_error == 0.5
    assert not result.passed


def test_no_vectors_is_no_proof() -> None:
    assert not run_selftest(variant(), Session()).passed
    assert not SelfTestResult(0, ()).passed


def test_an_output_without_a_tolerance(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no tolerance for output 'y'"):
        run_selftest(variant(cases=(case(tmp_path, INPUT, RIGHT),)), Session())


def test_vectors_that_do_not_fit(tmp_path: Path) -> None:
    class Broken(Session):
        def run(self, names: object, feeds: object) -> list[object]:
            raise RuntimeError("Got invalid\ndimensions")

    tested = variant(cases=(case(tmp_path, INPUT, RIGHT),), tolerance={"y": 0})
    with pytest.raises(BundleError, match=r"does not fit the model \(Got invalid dimensions\)"):
        run_selftest(tested, Broken())


def test_texts_are_compared_of_arrays_of_any_width() -> None:
    assert compare(np.array(["a"]), np.array(["a"], dtype="<U7")) == (0.0, "")


@pytest.mark.parametrize(
    ("found", "expected", "says"),
    [
        (RIGHT, RIGHT.ravel(), "shape (1, 3) instead of (3,)"),
        (RIGHT, RIGHT.astype(np.float64), "dtype float32 instead of float64"),
        (RIGHT * np.float32("nan"), RIGHT, "it is not finite"),
        (RIGHT, RIGHT * np.float32("inf"), "the expected values are not finite"),
        (np.array(["a"]), np.array(["bc"]), "its texts differ"),
        (np.array([b"a"]), np.array([b"a"]), "cannot be compared"),
    ],
)
def test_shapes_and_types_must_match(found: np.ndarray, expected: np.ndarray, says: str) -> None:
    error, problem = compare(found, expected)
    assert error == float("inf")
    assert says in problem


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "float16", "int64", "float64"])
def test_every_kind_of_number_compares(dtype: str) -> None:
    left, right = np.array([0, 1], dtype), np.array([1, 1], dtype)
    assert compare(left, right) == (1.0, "")
    assert compare(left[:0], right[:0]) == (0.0, "")


def test_a_slice_has_a_tolerance_of_its_own(tmp_path: Path) -> None:
    wrong = RIGHT + np.array([[0, 0.25, 0]], np.float32)
    (tmp_path / "b").mkdir()
    cases = (case(tmp_path, INPUT, wrong), case(tmp_path / "b", INPUT, RIGHT))
    first, second = SliceTolerance(1, 0, 0, 0.125), SliceTolerance(1, 1, 2, 0.125)
    tested = variant(cases=cases, tolerance={"y": 0.5}, slices={"y": (first, second)})
    result = run_selftest(tested, Session())
    assert [(check.name, check.passed) for check in result.outputs] == [
        ("y", True),
        ("y, 0 on axis 1", True),
        ("y, 1..2 on axis 1", False),
    ]
    assert not result.passed
    assert result.reason == "output y, 1..2 on axis 1: error 0.25 is over 0.125"


@pytest.mark.parametrize("part", [SliceTolerance(2, 0, 0, 9.0), SliceTolerance(1, 1, 3, 9.0)])
def test_a_slice_that_is_not_there_fails(part: SliceTolerance, tmp_path: Path) -> None:
    tested = variant(cases=(case(tmp_path, INPUT, RIGHT),), tolerance={"y": 9.0}, slices={"y": (part,)})
    result = run_selftest(tested, Session())
    assert not result.passed
    assert "there is no such part of shape (1, 3)" in result.reason
