"""The public interface: the curated list, and what its functions take. tests/docs runs the examples of docs/api.md."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import edgeq
from edgeq import demo

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text("utf-8")
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


EIGHT = edgeq.Data(demo.VALIDATION, count=8)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edgeq.quantize(demo.MODEL, EIGHT, tmp_path_factory.mktemp("api") / "int8.onnx", timed=False).output


def test_every_function_takes_data(quantized: Path) -> None:
    assert edgeq.calibrate(demo.MODEL, EIGHT).samples == 8
    assert edgeq.compare(demo.MODEL, quantized, EIGHT, task="classification", timed=False).samples == 8
    assert edgeq.debug(demo.MODEL, quantized, EIGHT).written.count == 8
