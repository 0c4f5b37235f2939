"""Count how often one `quantize` parses a model, because parsing protobuf repeatedly would be slow."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import edgeq
from edgeq import demo
from edgeq.model import files, load, parsing
from edgeq.model.prepare import PREPARED_NAME

Parsed = Counter[Path]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    """Count the parses of each file in edgeq's own code. onnxruntime's quantizer parses its input itself."""
    counted: Parsed = Counter()

    def counting(function: Callable[..., Any], path_of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            if caller.partition(".")[0] == "edgeq":
                counted[Path(path_of(*arguments))] += 1
            return function(*arguments, **options)

        return call

    for module in (load, files):
        monkeypatch.setattr(module, "parse_model", counting(parsing.parse_model, lambda path: path))
    for library, names in {onnx: ("load", "load_model", "load_model_from_string"), ir: ("load",)}.items():
        for name in names:
            monkeypatch.setattr(library, name, counting(getattr(library, name), lambda first, *_: str(first)[:200]))
    return counted


@pytest.mark.parametrize(
    "options", [{}, {"overrides": {"format": "QOperator", "method": "entropy"}}, {"target": "x86-64-avx2"}]
)
def test_source_and_prepared_model_are_parsed_once(tmp_path: Path, parsed: Parsed, options: dict[str, Any]) -> None:
    edgeq.quantize(demo.MODEL, demo.CALIBRATION, tmp_path / "int8.onnx", timed=False, **options)
    assert parsed[demo.MODEL] == 1
    prepared = [count for path, count in parsed.items() if path.name == PREPARED_NAME]
    assert prepared == [1], "sessions take it as its file has it, read once"


def test_debug_parses_both_models_once(tmp_path: Path, parsed: Parsed) -> None:
    int8 = tmp_path / "int8.onnx"
    edgeq.quantize(demo.MODEL, demo.CALIBRATION, int8, timed=False)
    parsed.clear()
    assert edgeq.debug(demo.MODEL, int8, demo.CALIBRATION, count=2).prepared, "the demo has to be prepared to match"
    assert (parsed[demo.MODEL], parsed[int8]) == (1, 1)


def test_parsing_is_noticed(parsed: Parsed) -> None:
    load.load_model(demo.MODEL)
    files.model_files(demo.MODEL)
    assert parsed == {demo.MODEL: 1}
