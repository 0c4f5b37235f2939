"""How it was made and how to make it again: scheme, machine, versions, commands, digests."""

from __future__ import annotations

from edgeq.report.data import Pairs, ReportData, Variant
from edgeq.report.markup import Markup, isolated, join, tag
from edgeq.report.sections.blocks import facts, folded, notes, section


def scheme_section(variant: Variant, anchor: str = "scheme") -> Markup:
    """The settings of one variant."""
    return section(
        anchor,
        "How it is quantized",
        _titled("Target", variant.facts),
        _titled("Scheme", variant.scheme),
        _titled("Session options it must be run with", variant.session_options),
        folded(f"Nodes kept in float on request: {len(variant.excluded)}", notes(variant.excluded))
        if variant.excluded
        else None,
    )


def making_section(data: ReportData) -> Markup:
    """The machine, the versions, the commands."""
    return section(
        "making",
        "Machine and commands",
        tag("pre", tag("code", *_lines(data.commands)), tabindex=0, aria_label="Commands") if data.commands else None,
        tag(
            "div",
            _titled("Machine of the measurements", data.machine),
            _titled("Versions", data.versions),
            class_="columns",
        )
        if data.machine or data.versions
        else None,
        _titled("Identity", data.identity),
        notes(data.notes),
    )


def _titled(title: str, pairs: Pairs) -> Markup | None:
    return tag("div", tag("h3", title), facts(pairs)) if pairs else None


def _lines(commands: tuple[str, ...]) -> list[Markup]:
    return [join([isolated(command, limit=500), Markup("\n")]) for command in commands]
