"""Check the pictures of a report: they are drawn for the images that differ most, and only safe ones are shown."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

import edgeq
from edgeq.reporting.page import render
from edgeq.reporting.read import PicturePair, read_report
from tests.measure.test_answers import detector  # noqa: F401  (a fixture)


def test_a_bundle_shows_the_answers_that_differ_most(detector: Path, tmp_path: Path) -> None:  # noqa: F811
    model, images = detector / "detector.onnx", detector / "images"
    edgeq.package(model, images, tmp_path / "bundle", timed=False, effort=None, emulate=False)
    record = json.loads((tmp_path / "bundle" / "report.json").read_text("utf-8"))
    (variant,) = record["variants"].values() if isinstance(record["variants"], dict) else record["variants"]
    pictures = variant["pictures"]
    assert [pair["figure"] for pair in pictures] == sorted(pair["figure"] for pair in pictures)
    assert {pair["sample"] for pair in pictures} <= {path.name for path in images.iterdir()}
    for uri in (pictures[0]["float32"], pictures[0]["int8"]):
        content = base64.b64decode(uri.partition(",")[2])
        assert Image.open(io.BytesIO(content)).size == (100, 80)
    page = (tmp_path / "bundle" / "report.html").read_text("utf-8")
    assert page.count("<img ") == 2 * len(pictures)
    assert "Against float32&#39;s answers" in page or "Against float32's answers" in page
    # Whoever changes the record cannot load anything with it.
    pictures[0]["int8"] = 'javascript:alert(1)"'
    assert render(read_report(record)).count("<img ") == 2 * len(pictures) - 2


@pytest.mark.parametrize(
    "uri", ["", "data:text/html;base64,AAAA", "https://example.com/a.jpg", "data:image/jpeg;base64,<"]
)
def test_refuses_pictures_that_are_no_jpeg(uri: str) -> None:
    safe = "data:image/jpeg;base64,AAAA"
    assert PicturePair("a", 0.5, safe, safe).safe
    assert not PicturePair("a", 0.5, safe, uri).safe
