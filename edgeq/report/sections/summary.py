"""The verdict, first on the page."""

from __future__ import annotations

from edgeq.report.data import ReportData, Variant
from edgeq.report.markup import Markup, isolated, tag
from edgeq.report.numbers import decibels, metric, milliseconds, share, size
from edgeq.report.sections.blocks import notes, section, table
from edgeq.report.verdict import Figure, Verdict, compared, timing_of, verdict_of

_SIGNS = {"good": "✓", "bad": "!", "neutral": "•"}


def verdict_block(data: ReportData, variant: Variant | None) -> Markup:
    """The sentence and its figures."""
    verdict = verdict_of(data, variant)
    return tag(
        "section",
        _sentence(verdict),
        tag("ul", *(_figure(f) for f in verdict.figures), class_="figures") if verdict.figures else None,
        notes(verdict.warnings, class_="warnings"),
        id="verdict",
        class_=f"verdict {verdict.tone}",
        aria_label="Verdict",
    )


def variants_section(data: ReportData) -> Markup:
    """One line a variant, where there are several."""
    if len(data.variants) < 2:
        return Markup()
    return section(
        "variants",
        "Variants",
        table(
            ("variant", "for", "median", "accuracy", "SQNR", "in int8", "size", "checked"),
            (_variant_row(data, v) for v in data.variants),
            text_columns=(0, 1, 7),
            caption="Every variant in the bundle",
        ),
        lead="The bundle holds one model for each target; a device picks the best that it can run.",
    )


def _sentence(verdict: Verdict) -> Markup:
    return tag(
        "div",
        tag(
            "p",
            tag("span", _SIGNS[verdict.tone], class_="sign", aria_hidden="true"),
            " ",
            verdict.status,
            class_="word",
        ),
        tag("p", verdict.sentence, class_="sentence"),
    )


def _figure(figure: Figure) -> Markup:
    return tag(
        "li",
        tag("span", figure.label, class_="label"),
        tag("span", figure.value, class_=f"number {figure.tone}"),
        tag("span", figure.note, class_="note") if figure.note else None,
    )


def _variant_row(data: ReportData, variant: Variant) -> list[str | None]:
    primary = variant.primary
    pair = compared(timing_of(data, variant), variant)
    accuracy = metric(primary.name, primary.int8) if primary and primary.int8 is not None else "–"
    checked = {True: "on its own kernels", False: "on others' kernels", None: "–"}[variant.native]
    return [
        isolated(variant.name, limit=40),
        isolated(variant.title or "–", limit=60),
        milliseconds(pair[1].p50) if pair else "–",
        accuracy,
        decibels(variant.sqnr_db) if variant.sqnr_db is not None else "–",
        share(variant.coverage.share) if variant.coverage else "–",
        size(variant.bytes) if variant.bytes else "–",
        checked,
    ]
