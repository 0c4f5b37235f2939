"""The public interface: the curated list, what its functions take, and the examples of docs/api.md."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import pytest

import edgeq
from edgeq import demo

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FUNCTIONS = [name for name in edgeq.__all__ if callable(getattr(edgeq, name)) and name[0].islower()]
PATHS = ("model", "output", "path", "statistics", "against", "float_model", "quantized")


def test_the_page_lists_what_is_public() -> None:
    listed = {name for row in re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert listed == set(edgeq.__all__)
    assert edgeq.__all__ == sorted(edgeq.__all__, key=lambda name: (name[0].islower(), name[0] == "_", name))


def test_every_name_is_there_and_no_other() -> None:
    for name in edgeq.__all__:
        assert getattr(edgeq, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        edgeq.nothing  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_path_may_be_a_string(name: str) -> None:
    for parameter in inspect.signature(getattr(edgeq, name)).parameters.values():
        if parameter.name in PATHS and "Path" in str(parameter.annotation):
            assert "str" in str(parameter.annotation), f"{name}: {parameter}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_takes_and_raises(name: str) -> None:
    text = inspect.getdoc(inspect.unwrap(getattr(edgeq, name))) or ""
    assert len(text.split()) > 8
    if name not in ("detect",):
        assert "Raises:" in text


@pytest.mark.slow
def test_the_examples_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (demo.MODEL, demo.CALIBRATION, demo.VALIDATION):
        shutil.copy(file, tmp_path)
    assert len(EXAMPLES) == 3
    for example in EXAMPLES:
        exec(compile(example, "docs/api.md", "exec"), {})
    assert Path("int8.onnx").stat().st_size < Path("model.onnx").stat().st_size
