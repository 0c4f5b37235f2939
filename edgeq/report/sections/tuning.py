"""The search: every candidate as a mark, and as a line."""

from __future__ import annotations

from edgeq.report.charts.pareto import NAMES, mark, pareto
from edgeq.report.data import Candidate, ReportData, Tuning
from edgeq.report.markup import Markup, isolated, join, tag
from edgeq.report.numbers import metric, metric_name, milliseconds, share, size
from edgeq.report.sections.blocks import facts, folded, notes, section, table
from edgeq.report.svg import both

_SHOWN = 12
_RANK = {"chosen": 0, "float32": 1, "front": 2, "behind": 3, "short": 4, "slow": 5, "dropped": 6}


def tuning_section(data: ReportData) -> Markup:
    """Plot, legend, the settings of what is pointed at, and a table."""
    tuning = data.tuning
    if tuning is None:
        return Markup()
    ordered = sorted(tuning.candidates, key=lambda c: (_RANK.get(c.status, 9), c.latency_ms or float("inf"), c.name))
    rest = ordered[_SHOWN:]
    left_out = f", {tuning.left_out} more are only in the record" if tuning.left_out else ""
    return section(
        "tuning",
        "What could be had",
        notes(tuning.notes),
        _plot(tuning),
        _table(tuning, ordered[:_SHOWN], "Candidates, the best first"),
        folded(f"{len(rest)} more candidates{left_out}", _table(tuning, rest, "The other candidates"))
        if rest
        else None,
        facts(tuning.facts, class_="two"),
        lead="Each mark is a way to run the model on this machine. Up is more accurate, left is faster."
        if tuning.higher_is_better
        else "Each mark is a way to run the model on this machine. Down is more accurate, left is faster.",
    )


def _plot(tuning: Tuning) -> Markup:
    wide = pareto(tuning, 880, 420)
    if not wide:
        return Markup()
    present = {c.status if c.status in NAMES else "short" for c in tuning.candidates}
    if "mark off" in wide:
        present.add("off")
    legend = tag(
        "ul",
        *(tag("li", _sample(status), name) for status, name in NAMES.items() if status in present),
        class_="legend",
    )
    panels = [tag("div", _detail(c, tuning), data_detail=i, hidden=True) for i, c in enumerate(tuning.candidates)]
    hint = tag("p", "Point at a mark, or reach it with the tab key, for its settings.", class_="hint")
    return tag(
        "div",
        both(wide, pareto(tuning, 350, 360)),
        legend,
        tag("div", hint, class_="detail", aria_live="polite"),
        *panels,
        class_="plot interactive",
    )


def _sample(status: str) -> Markup:
    return tag("svg", mark(status), viewBox="-10 -10 20 20", width=16, height=16, aria_hidden="true", class_="sample")


def _detail(candidate: Candidate, tuning: Tuning) -> Markup:
    return join(
        [
            tag("p", tag("strong", isolated(candidate.name, limit=120)), " ", _figures(candidate, tuning)),
            tag("p", isolated(candidate.reason, limit=400), class_="muted") if candidate.reason else None,
            facts(candidate.settings),
        ]
    )


def _figures(candidate: Candidate, tuning: Tuning) -> str:
    texts = [
        milliseconds(candidate.latency_ms) if candidate.latency_ms else "",
        f"{metric_name(tuning.metric)} {metric(tuning.metric, candidate.accuracy)}"
        if candidate.accuracy is not None
        else "",
        size(candidate.bytes) if candidate.bytes else "",
        f"{share(candidate.coverage)} in int8" if candidate.coverage is not None else "",
    ]
    return ", ".join(s for s in texts if s)


def _table(tuning: Tuning, candidates: list[Candidate], caption: str) -> Markup:
    return table(
        ("candidate", "median", metric_name(tuning.metric), "size", "why"),
        (
            [
                tag("span", _sample(c.status), " ", isolated(c.name, limit=60), class_="candidate"),
                milliseconds(c.latency_ms) if c.latency_ms else "–",
                metric(tuning.metric, c.accuracy) if c.accuracy is not None else "–",
                size(c.bytes) if c.bytes else "–",
                tag("span", isolated(c.reason or NAMES.get(c.status, ""), limit=160), class_="why"),
            ]
            for c in candidates
        ),
        text_columns=(0, 4),
        caption=caption,
    )
