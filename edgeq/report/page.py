"""The whole page: one HTML file without a single reference to anything outside of it."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from edgeq import __version__
from edgeq.report.data import ReportData, Variant
from edgeq.report.markup import Markup, isolated, join, shorten, tag
from edgeq.report.sections.accuracy import accuracy_section
from edgeq.report.sections.coverage import coverage_section
from edgeq.report.sections.histograms import histograms_section
from edgeq.report.sections.latency import latency_section
from edgeq.report.sections.layers import layers_section
from edgeq.report.sections.making import making_section, scheme_section
from edgeq.report.sections.summary import variants_section, verdict_block
from edgeq.report.sections.tuning import tuning_section

_HERE = Path(__file__).parent
_DETAILED = 8
"""So many variants are shown in full; of more there is the line in the table."""


def render(data: ReportData) -> str:
    """The report as one HTML document: the same data give the same text."""
    style = (_HERE / "style.css").read_text("utf-8")
    script = (_HERE / "script.js").read_text("utf-8")
    main = data.main
    body = join(
        [
            _header(data, main),
            tag(
                "main",
                verdict_block(data, main),
                tuning_section(data),
                variants_section(data),
                latency_section(data, main),
                *_details(data),
                making_section(data),
            ),
            tag("footer", tag("p", f"Written by edgeq {__version__}. This file needs no network and loads nothing.")),
        ]
    )
    head = join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="generator", content=f"edgeq {__version__}"),
            tag("title", f"{shorten(data.name, 80)}: int8 report"),
            tag("style", Markup(style)),
        ]
    )
    page = tag("html", tag("head", head), tag("body", body, tag("script", Markup(script))), lang="en")
    return f"<!doctype html>\n{page}\n"


def _policy(script: str) -> str:
    """Only this very script may run, and nothing may be loaded: if a text ever slipped through, it would do nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    only = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    return f"default-src 'none'; {only}; base-uri 'none'; form-action 'none'"


def _header(data: ReportData, main: Variant | None) -> Markup:
    about = [t for t in ((main.title or main.name) if main and len(data.variants) == 1 else "", _machine(data)) if t]
    return tag(
        "header",
        tag("p", "edgeq report", class_="brand"),
        tag("h1", isolated(data.name, limit=120)),
        tag("p", join([isolated(a, limit=120) for a in about], " · "), class_="about") if about else None,
    )


def _machine(data: ReportData) -> str:
    known = dict(data.machine)
    return known.get("board") or known.get("cpu name") or known.get("cpu") or ""


def _details(data: ReportData) -> list[Markup]:
    if len(data.variants) == 1:
        return _variant(data.variants[0], "")
    found = []
    for i, variant in enumerate(data.variants[:_DETAILED]):
        inner = join(_variant(variant, f"v{i}-"))
        title = tag("h2", isolated(variant.title or variant.name, limit=100), class_="variant-title")
        found.append(tag("article", title, inner, id=f"variant-{i}") if inner else Markup())
    return found


def _variant(variant: Variant, prefix: str) -> list[Markup]:
    return [
        accuracy_section(variant, f"{prefix}accuracy"),
        layers_section(variant, f"{prefix}layers"),
        coverage_section(variant, f"{prefix}coverage"),
        histograms_section(variant, f"{prefix}ranges"),
        scheme_section(variant, f"{prefix}scheme"),
    ]
