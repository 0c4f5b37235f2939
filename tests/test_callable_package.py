"""Test that `edgeq.tune` and `edgeq.calibrate` are functions and packages, in whatever order they are imported."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import edgeq
from edgeq.jobs.calibrate import calibrate
from edgeq.jobs.tune import tune


def test_the_public_name_is_the_function_and_the_package() -> None:
    assert inspect.signature(edgeq.calibrate) == inspect.signature(calibrate)
    assert inspect.signature(edgeq.tune) == inspect.signature(tune)
    assert inspect.unwrap(edgeq.tune) is tune


@pytest.mark.parametrize("name", ["calibrate", "tune"])
def test_it_is_callable_before_and_after_its_modules_are_imported(name: str) -> None:
    code = (
        f"import edgeq; first = edgeq.{name}; assert callable(first); "
        f"import edgeq.{name} as package, edgeq.scheme; from edgeq import {name}; "
        f"assert {name} is first is package is edgeq.{name}; assert {name}.__path__; "
        f"help = __import__('inspect').signature(edgeq.{name})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_call_arrives() -> None:
    with pytest.raises(TypeError, match=r"calibrate\(\)"):
        edgeq.calibrate()  # type: ignore[call-arg]
