"""Test that the public names are functions that `help` can describe, in whatever order modules are imported."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from types import FunctionType

import pytest

import edgeq
from edgeq.jobs.calibrate import calibrate
from edgeq.jobs.tune import tune


@pytest.mark.parametrize("name", ["bench", "calibrate", "package", "quantize", "report", "retarget", "tune"])
def test_help_shows_the_arguments(name: str) -> None:
    function = getattr(edgeq, name)
    assert isinstance(function, FunctionType)
    text = pydoc.plain(pydoc.render_doc(function))
    assert all(argument in text for argument in inspect.signature(function).parameters)


def test_the_public_name_has_the_signature_of_the_function() -> None:
    assert inspect.signature(edgeq.tune) == inspect.signature(tune)
    assert inspect.unwrap(edgeq.tune) is tune


def test_options_of_a_group_are_arguments_in_help() -> None:
    assert "options" in inspect.signature(calibrate).parameters
    shown = inspect.signature(edgeq.calibrate).parameters
    assert {"preprocess", "count", "start", "stride", "memory", "threads"} <= set(shown)
    assert "options" not in shown
    for function in (edgeq.calibrate, edgeq.debug, edgeq.compare):
        documented = inspect.getdoc(function) or ""
        assert not [name for name in inspect.signature(function).parameters if name not in f"{documented} progress"]


def test_imports_of_modules_do_not_replace_functions() -> None:
    code = (
        "import edgeq; first = edgeq.tune; import edgeq.tuning, edgeq.jobs.tune; from edgeq import tune; "
        "assert tune is first is edgeq.tune"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_wrong_call_names_the_function() -> None:
    with pytest.raises(TypeError, match=r"calibrate\(\)"):
        edgeq.calibrate()  # type: ignore[call-arg]
