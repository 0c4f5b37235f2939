"""Test the public functions in a Python session: progress, arguments as words, earlier names, errors of one line."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import edgeq
from edgeq import demo

EIGHT = edgeq.Data(demo.VALIDATION, count=8)


def test_an_error_is_one_line_in_a_notebook_and_short_elsewhere(tmp_path: Path) -> None:
    place = tmp_path / "taken.onnx"
    place.write_bytes(b"mine")
    with pytest.raises(edgeq.EdgeqError, match="`force=True`") as caught:
        edgeq.quantize(demo.MODEL, EIGHT, place)
    assert caught.value._render_traceback_() == [f"OutputError: {caught.value}"]
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 3
    assert "--force" not in str(caught.value)


def test_the_output_has_a_default_and_a_share_may_be_text(tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(demo.MODEL.read_bytes())
    labelled = edgeq.Data(demo.VALIDATION, count=8)
    made = edgeq.quantize(model, EIGHT, val=labelled, task="classification", max_drop="50%", timed=False)
    assert made.output == tmp_path / "m.int8.onnx"
    assert made.output.exists()


@pytest.mark.parametrize(
    ("drop", "says"),
    [
        ("1px", "`max_drop` '1px' is not a number"),
        (5, "the largest drop is 5"),
        ("1", "`max_drop` 1 would allow any loss. Write 1pt for 1 point"),
    ],
)
def test_a_loss_that_nobody_means_is_refused(tmp_path: Path, drop: object, says: str) -> None:
    with pytest.raises(edgeq.EdgeqError, match=says):
        edgeq.quantize(demo.MODEL, EIGHT, tmp_path / "m.onnx", task="classification", max_drop=drop)  # type: ignore[arg-type]


def test_earlier_names_of_arguments_are_taken(tmp_path: Path) -> None:
    made = edgeq.quantize(demo.MODEL, EIGHT, tmp_path / "m.onnx", validation=EIGHT, timed=False)  # type: ignore[call-arg]
    assert made.proof.samples == 8
    with pytest.raises(TypeError, match="validation"):
        edgeq.quantize(demo.MODEL, EIGHT, tmp_path / "n.onnx", val=EIGHT, validation=EIGHT)  # type: ignore[call-arg]


def test_a_budget_is_given_as_it_is_typed(tmp_path: Path) -> None:
    with pytest.raises(edgeq.EdgeqError, match="`budget` '60x'"):
        edgeq.tune(demo.MODEL, EIGHT, tmp_path / "b", budget="60x")
    with pytest.raises(edgeq.EdgeqError, match="largest drop"):
        edgeq.tune(demo.MODEL, EIGHT, tmp_path / "b", budget="60s", max_drop=2)


class Cell(ModuleType):
    """Replace `IPython.display` and keep what a cell shows."""

    def __init__(self) -> None:
        super().__init__("IPython.display")
        self.shown: list[str] = []

    def display(self, data: dict[str, str], **how: Any) -> None:
        assert how["raw"]
        self.shown.append(data["text/plain"])

    update_display = display


def test_a_notebook_shows_progress_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython, cell = ModuleType("IPython"), Cell()
    ipython.get_ipython = lambda: SimpleNamespace(kernel=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", cell)
    edgeq.calibrate(demo.MODEL, EIGHT)
    assert any("0/8" in text for text in cell.shown)
    assert "/8" not in cell.shown[-1]
    count = len(cell.shown)
    edgeq.calibrate(demo.MODEL, EIGHT, progress=edgeq.SILENT)
    assert len(cell.shown) == count


def test_results_show_values() -> None:
    assert "metrics={top1: " in repr(edgeq.evaluate(demo.MODEL, EIGHT, "classification"))
    found = edgeq.detect()
    assert found.match is not None
    assert f"profile='{found.match.profile.name}'" in repr(found)
    assert found.match.profile.name in edgeq.plain(found)["match"]["profile"]
    assert found.match.profile.name in found._repr_html_()
