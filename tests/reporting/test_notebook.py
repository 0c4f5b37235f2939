"""Test the tables and plots of results in notebooks. They load nothing from outside the cell."""

from __future__ import annotations

import re

import pytest

import edgeq
from edgeq import demo
from edgeq.jobs.quantize import Quantized
from edgeq.reporting.page import draw

from . import samples
from .test_page import Parsed


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    place = tmp_path_factory.mktemp("notebook")
    return edgeq.quantize(demo.MODEL, edgeq.Data(demo.CALIBRATION, count=4), place / "int8.onnx", timed=False)


def text_of(shown: str) -> str:
    return " ".join(Parsed(shown).text)


def test_results_draw_themselves(quantized: Quantized) -> None:
    shown = quantized._repr_html_()
    assert {"table", "style"} <= {tag for tag, _ in Parsed(shown).elements}
    assert "Coverage" in text_of(shown)
    assert "int8.onnx" in text_of(shown)
    assert "Operators" in text_of(edgeq.inspect(demo.MODEL)._repr_html_())
    assert "B against A" in text_of(edgeq.compare(demo.MODEL, quantized.output, timed=False)._repr_html_())
    found = edgeq.debug(demo.MODEL, quantized.output, demo.CALIBRATION, count=2)
    assert len(repr(found)) < 400
    assert "SQNR" in text_of(found._repr_html_())


def test_the_tuning_plot_and_latencies_are_drawn_without_a_script() -> None:
    shown = draw(samples.record())
    assert "pareto" in shown
    assert "Latency" in text_of(shown)
    assert not {"script", "html", "body", "link", "iframe"} & {tag for tag, _ in Parsed(shown).elements}


@pytest.mark.parametrize("name", samples.HOSTILE)
def test_names_of_models_are_escaped(name: str) -> None:
    known = {tag for tag, _ in Parsed(draw({**samples.record(), "tables": [("t", ("h",), [("c",)])]})).elements}
    record = samples.renamed(samples.record(), name)
    shown = draw({**record, "tables": [(name, (name, name), [(name, name)] * 2000)]})
    shown.encode("utf-8")
    assert {tag for tag, _ in Parsed(shown).elements} <= known
    assert not re.search("[\u202a-\u202e\u2066-\u2069\0\x1b]", shown)
    assert len(shown) < 3_000_000


def test_the_style_of_a_cell_stays_in_it() -> None:
    style = draw({}).partition("<style>")[2].partition("</style>")[0].strip()
    assert style.startswith(".edgeq.edgeq.edgeq {")
    assert style.count("{") == style.count("}")
    for selector in (":root", "\nbody", "\n  body"):
        assert selector not in style
