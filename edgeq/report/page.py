"""The whole page: one HTML file without a single reference to anything outside of it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from edgeq import __version__
from edgeq.bundle.plan import tool_versions
from edgeq.report import numbers, views
from edgeq.report.histogram_chart import histogram_chart
from edgeq.report.layers import layer_profile
from edgeq.report.numbers import escaped, isolated, shorten
from edgeq.report.read import ReportData, read_report, timing_of, verdict_of
from edgeq.report.timing import board_table, failures, kind_table, latency_chart
from edgeq.report.tuning import NAMES, mark, pareto, ring
from edgeq.report.views import layer_table, layers_view
from edgeq.util.records import plain, rounded

_HERE = Path(__file__).parent
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
_LISTED = 500
_DETAILED = 8
"""So many variants are shown in full; of more there is the line in the table."""


def render(data: ReportData) -> str:
    """The report as one HTML document: the same data give the same text."""
    script = (_HERE / "script.js").read_text("utf-8")
    main = data.main
    title = (main.title or main.name) if main and len(data.variants) == 1 else ""
    known = dict(data.machine)
    machine = known.get("board") or known.get("cpu name") or known.get("cpu") or ""
    return (
        _environment()
        .get_template("page.html")
        .render(
            **_shown(data),
            about=[text for text in ("int8 report", title, machine) if text],
            policy=_policy(script),
            style=Markup(_style()),
            script=Markup(script),
            version=__version__,
        )
    )


def fragment(data: ReportData, tables: Sequence[Table] = ()) -> str:
    """The report's sections for a page of somebody else's, such as a notebook: no script, and no style but their own.

    Args:
        tables: what stands before them: caption, heads and rows of text.
    """
    own = _style().replace(":root", "&").replace("\nbody {", "\n& {").replace("\n  body {", "\n  & {")
    style = Markup(f".edgeq {{{own}\n.detail {{ display: none; }}\n}}")
    shown = [
        (caption, heads, [[isolated(cell, 200) for cell in row] for row in rows[:_LISTED]])
        for caption, heads, rows in tables
    ]
    return _environment().get_template("notebook.html").render(**_shown(data), style=style, tables=shown)


def _shown(data: ReportData) -> dict[str, Any]:
    return {"data": data, "main": data.main, "verdict": verdict_of(data, data.main), "detailed": _DETAILED}


def _style() -> str:
    return (_HERE / "style.css").read_text("utf-8")


@cache
def _environment() -> Environment:
    """Everything that a template prints is escaped, and control and direction characters in it are made visible."""
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=escaped,
    )
    environment.filters.update(isolated=isolated, shorten=shorten, or_dash=views.or_dash)
    charts = (histogram_chart, latency_chart, layer_profile, mark, pareto, ring)
    functions = (*charts, board_table, kind_table, failures, layer_table, layers_view, timing_of, verdict_of)
    environment.globals.update({function.__name__: function for function in functions})
    environment.globals.update(numbers=numbers, views=views, status_names=NAMES)
    return environment


def _policy(script: str) -> str:
    """Only this very script may run, and nothing may be loaded: if a text ever slipped through, it would do nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    only = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    return f"default-src 'none'; {only}; base-uri 'none'; form-action 'none'"


SCHEMA = "edgeq.report/1"
RECORD, PAGE, TUNING = "report.json", "report.html", "tuning.json"
DEVICE_COMMANDS = ("edgeq report BUNDLE --bench", "edgeq verify BUNDLE", "python edgeq_run.py bench   # on the device")
DIGITS = 5


def make_record(
    name: str,
    variants: Mapping[str, Mapping[str, Any]],
    *,
    model: Mapping[str, Any] | None = None,
    commands: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The record that report.json holds; keys as docs/report.md lists them.

    Args:
        variants: by name, what `edgeq package --json` says of each, with `title`, `histograms`, `layers` and `kernels`
            where they are known.
        model: sha256 and bytes of the float32 model.
    """
    return {
        "schema": SCHEMA,
        "name": name,
        "model": dict(model or {}),
        "variants": {name: dict(body) for name, body in variants.items()},
        "versions": tool_versions(),
        "identity": {},
        "commands": list(commands),
        "notes": list(notes),
    }


def report_files(record: Mapping[str, Any], tuning: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """The files that a bundle carries (`BundleSpec.extras`): report.json, and report.html that also draws `tuning`.

    Numbers are rounded, so that the last bit of a sum does not change the bundle. The tuning record has a file of its
    own, which is not among these.
    """
    kept = rounded(plain(record), DIGITS)
    shown = kept if tuning is None else {**kept, "tuning": rounded(plain(tuning), DIGITS)}
    return {
        RECORD: (json.dumps(kept, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8"),
        PAGE: page_of(shown),
    }


def page_of(record: Mapping[str, Any]) -> bytes:
    """The HTML page of a record, which may come from anywhere."""
    return render(read_report(record)).encode("utf-8")


def draw(record: Mapping[str, Any]) -> str:
    """HTML for a notebook's cell: what a report would show of `record`, styled on its own, and its "tables" (caption,
    heads, rows of text).

    Names in it come from models; they are escaped and shortened as on the page.
    """
    return fragment(read_report(record), record.get("tables", ()))
