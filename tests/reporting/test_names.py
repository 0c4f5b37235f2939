"""Test that names from a model stay plain text: escaped, on one line, isolated, shortened."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from edgeq.reporting.figures import escaped, isolated, join, shorten, tag, visible

from .samples import HOSTILE


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.content = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(attrs)

    def handle_data(self, data: str) -> None:
        self.content += data


def parse(markup: str) -> Seen:
    seen = Seen()
    seen.feed(markup)
    seen.close()
    return seen


@given(st.one_of(st.text(), st.sampled_from(HOSTILE)))
def test_text_stays_text(value: str) -> None:
    seen = parse(tag("text", value, aria_label=value))
    assert seen.tags == ["text"]
    assert seen.content == visible(value)
    assert seen.attributes == {"aria-label": visible(value)}


@given(st.text())
def test_everything_can_be_written_as_utf8_on_one_line(value: str) -> None:
    shown = escaped(value)
    shown.encode("utf-8")
    assert len(shown.splitlines()) <= 1


def test_markup_is_not_escaped_twice() -> None:
    assert tag("g", tag("text", "a & b"), " < ", Markup("<i>x</i>")) == ("<g><text>a &amp; b</text> &lt; <i>x</i></g>")


def test_attributes() -> None:
    assert tag("line", x1=1.0, x2=2.345, stroke_width=-0.001, class_=None) == (
        '<line x1="1" x2="2.35" stroke-width="0"></line>'
    )


def test_direction_characters_are_shown_and_names_isolated() -> None:
    shown = isolated("safe\u202etxt.exe")
    assert "safe⟨202E⟩txt.exe</bdi>" in shown
    assert visible("שלום 🙂 e\u0301") == "שלום 🙂 e\u0301"
    assert isolated("<b>", class_="layer") == '<bdi class="layer">&lt;b&gt;</bdi>'


@pytest.mark.parametrize("limit", [4, 5, 10, 99])
def test_shortening_keeps_both_ends(limit: int) -> None:
    name = "start/" + "middle/" * 3000 + "end"
    shown = shorten(name, limit)
    assert len(shown) == limit
    assert shown[0] == "s"
    assert shown[-1] == "d"
    assert "…" in shown
    assert shorten("short", 5) == "short"


def test_a_long_name_is_whole_on_hover() -> None:
    shown = isolated("a" * 300, limit=20)
    assert parse(shown).attributes["title"] == "a" * 300
    assert len(isolated("a" * 100_000)) < 2000


def test_join_leaves_none_out() -> None:
    assert join(["a", None, "<"]) == "a&lt;"
