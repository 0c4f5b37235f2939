"""Test parts of charts: text that fits, labels that do not overlap, axes with units."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from edgeq.reporting.figures import EM, Box, Scale, axis_width, figure, fitted, place_label, text_width, x_axis, y_axis

from .samples import HOSTILE


@given(st.one_of(st.text(min_size=1, max_size=300), st.sampled_from(HOSTILE)), st.floats(20, 400))
def test_fitted_text_fits(text: str, width: float) -> None:
    shown = fitted(text, width)
    assert text_width(shown) <= width or len(shown) <= 3


def test_wide_letters_are_wide() -> None:
    assert text_width("iiii") < text_width("mmmm") < text_width("漢漢漢漢")


def test_labels_keep_apart() -> None:
    frame = Box(0, 0, 200, 200)
    taken: list[Box] = []
    for i in range(8):
        place = place_label(100 + i, 100, 60, frame, taken)
        if place is not None:
            taken.append(place[3])
    assert 2 <= len(taken) < 8
    for i, box in enumerate(taken):
        assert box.inside(frame)
        assert not any(box.overlaps(other) for other in taken[:i])


def test_no_space_no_label() -> None:
    assert place_label(5, 5, 500, Box(0, 0, 100, 100), []) is None


def test_tick_labels_never_touch() -> None:
    scale = Scale(0, 1_000_000, 0, 120)
    drawn = ElementTree.fromstring(x_axis(scale, 100, 0, "bytes", limit=9))
    labels = [e for e in drawn.iter("text") if e.get("class") == "tick"]
    ends = float("-inf")
    assert labels
    for label in labels:
        half = text_width(label.text or "") / 2
        assert float(label.get("x", "")) - half >= ends
        ends = float(label.get("x", "")) + half


def test_axes_name_their_unit_and_leave_space() -> None:
    scale = Scale(56, 57, 200, 20)
    assert "top-1 (%)" in y_axis(scale, axis_width(scale), 300, "top-1 (%)")
    assert axis_width(scale) > text_width("56.5")


@given(st.sampled_from(HOSTILE))
def test_a_figure_is_well_formed_whatever_it_says(name: str) -> None:
    drawn = figure(100, 50, name, x_axis(Scale(0, 1, 10, 90), 40, 5, name))
    root = ElementTree.fromstring(drawn)
    assert root.get("role") == "img"
    assert re.fullmatch(r"0 0 100 50", root.get("viewBox", ""))
    assert {e.tag for e in root.iter()} <= {"svg", "g", "line", "text"}
    assert EM > 10
