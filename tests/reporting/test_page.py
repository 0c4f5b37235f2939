"""Test the page: one file that loads nothing, with no text of a model as markup, limited in size, reproducible."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import edgeq.reporting
from edgeq.reporting.page import layers_view, ordered_candidates, render
from edgeq.reporting.read import read_report

from . import samples

STYLE = (Path(edgeq.reporting.__file__).parent / "style.css").read_text("utf-8")
SCRIPT = (Path(edgeq.reporting.__file__).parent / "script.js").read_text("utf-8")


class Parsed(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._inside: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            while self._inside.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._inside[-1:]):
            self.text.append(data)


def page_of(record: dict[str, Any]) -> str:
    return render(read_report(record))


@pytest.fixture(scope="module")
def full() -> str:
    return page_of(samples.record())


def test_nothing_is_loaded(full: str) -> None:
    elements = Parsed(full).elements
    loading = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "background", "ping"}
    assert not [(t, a) for t, a in elements if loading & set(a)]
    assert not {"link", "iframe", "object", "embed", "base", "img", "image", "use", "foreignobject"} & {
        t for t, _ in elements
    }
    assert "@import" not in full
    assert "url(" not in full
    assert "http://" not in full.replace("http-equiv", "")
    assert "https://" not in full


def test_only_our_script_may_run(full: str) -> None:
    assert full.count("<script") == 1
    policy = next(a["content"] for t, a in Parsed(full).elements if a.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not [a for _, a in Parsed(full).elements if any(key.startswith("on") for key in a)]


@pytest.mark.parametrize("name", samples.HOSTILE)
def test_no_name_becomes_markup(name: str, full: str) -> None:
    record = samples.renamed(samples.record(), name)
    record["variants"] = {name: samples.renamed(samples.variant(), name), "other": samples.variant(3)}
    page = page_of(record)
    page.encode("utf-8")
    parsed = Parsed(page)
    assert page.count("<script") == 1
    assert {t for t, _ in parsed.elements} <= {t for t, _ in Parsed(full).elements} | {"article"}
    assert not [a for _, a in parsed.elements if any(key.startswith("on") for key in a)]
    assert not re.search("[\u202a-\u202e\u2066-\u2069\0\x1b]", page)
    assert len(page) < 3_000_000


def test_ids_are_unique_and_labels_point_to_something(full: str) -> None:
    two = page_of(samples.record(variants={"a": samples.variant(), "b": samples.variant()}))
    for page in (full, two):
        ids = [a["id"] for _, a in Parsed(page).elements if "id" in a]
        assert len(ids) == len(set(ids))
        named = {a["aria-labelledby"] for _, a in Parsed(page).elements if "aria-labelledby" in a}
        assert named <= set(ids)


def test_every_drawing_says_what_it_shows(full: str) -> None:
    for tag, attributes in Parsed(full).elements:
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"


def test_headings_are_in_order(full: str) -> None:
    levels = [int(t[1]) for t, _ in Parsed(full).elements if re.fullmatch(r"h[1-6]", t)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_the_verdict_comes_first(full: str) -> None:
    assert full.index('id="verdict"') < full.index("<h2") < full.index('id="making"')


def test_the_same_data_give_the_same_page(full: str) -> None:
    again = json.loads(json.dumps(samples.record()))
    assert page_of(again) == full


def test_size_is_bounded() -> None:
    huge = samples.variant(layers=6000)
    huge["histograms"] *= 30
    huge["coverage"]["float_nodes"] *= 5000
    record = samples.record(variants={f"v{i}": huge for i in range(12)})
    record["tuning"]["candidates"] *= 400
    record["notes"] = ["x" * 5000] * 1000
    page = page_of(record)
    assert len(page) < 12_000_000
    assert "of 6000 layers" in page


def test_only_recorded_parts_have_a_section() -> None:
    bare = page_of({"name": "m", "variants": {"v": {"bytes": 1000}}})
    assert "Latency" not in bare
    assert "Coverage" not in bare
    assert 'id="making"' not in bare


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Return the contrast ratio of two colours by WCAG 2."""
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_text_and_marks_stand_out(scheme: str) -> None:
    first, _, printed = STYLE.partition("@media print")
    pairs = re.findall(r"--([a-z-]+): light-dark\((#\w+), (#\w+)\)", first)
    colours = {name: dark if scheme == "dark" else light for name, light, dark in pairs}
    if scheme == "print":
        colours.update(re.findall(r"--([a-z-]+): (#\w+)", printed))
    for ground in ("page", "card"):
        for text in ("text", "muted", "other", "good", "bad"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        assert contrast(colours["base"], colours[ground]) >= 3
    for area in ("other-area", "bad-area"):
        assert contrast(colours[area], colours["page"]) >= 2.5, area


def test_the_page_is_titled_by_the_model(full: str) -> None:
    text = [part.strip() for part in Parsed(full).text if part.strip()]
    assert text[:2] == ["net: int8 report", "net"]
    assert "edgeq report" not in text


def test_every_target_shows_its_verdict() -> None:
    page = page_of(samples.record(variants={n: {**samples.variant(3), "title": n.upper()} for n in ("a", "b", "c")}))
    assert page.count('aria-label="Verdict"') == 3
    for name in ("A", "B", "C"):
        assert re.search(rf"</span> [A-Z][a-z ]+ on <bdi>{name}</bdi>", page)


def test_candidates_come_in_the_order_that_the_caption_says() -> None:
    tuning = read_report(samples.record()).tuning
    assert tuning is not None
    ordered = ordered_candidates(tuning)
    assert [c.mark for c in ordered[:2]] == ["chosen", "float32"]
    least = tuning.least_accuracy
    assert least is not None
    out = [c.mark in ("short", "slow", "dropped") or (tuning.accuracy_of(c) or 0) < least for c in ordered[2:]]
    assert out == sorted(out)  # candidates that keep the accuracy come first, on the front or not
    assert any(out)
    kept = [c.latency_ms for c, is_out in zip(ordered[2:], out, strict=True) if not is_out and c.latency_ms]
    assert kept == sorted(kept)


@pytest.mark.parametrize("sources", [True, False])
def test_layers_come_in_the_order_that_the_heading_says(sources: bool) -> None:
    body = samples.variant()
    if sources:  # a model that loses accuracy
        body["accuracy"]["int8"]["metrics"]["top1"] = 0.4
    view = layers_view(read_report(samples.record(variants={"int8": body})).variants[0])
    assert view is not None
    assert ("error sources" in view["title"]) is sources
    rank = [(not layer.error_source, layer.own_db) for layer in view["worst"]]
    assert rank == sorted(rank)


def test_layers_that_int8_made_slower_are_pointed_out(full: str) -> None:
    assert "slower in int8" not in full
    body = samples.variant()
    times = body["kernels"]["int8"]
    times[3]["us"], times[3]["name"], times[7]["us"] = 300.0, "block.3/Conv", 130.0
    times[9] |= {"us": 500.0, "kind": "float"}  # float in both models: int8 is not the cause
    times[11]["us"] = 112.0  # the profiler causes a microsecond or two
    page = page_of(samples.record(variants={"int8": body}))
    assert "2 layers take longer in int8 than in float32, by 220 µs in this profile" in page
    assert "--exclude block.3/Conv --exclude block.7/Conv</bdi>" in page
