"""Print a benchmark's report as text, the same on workstation and device."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from edgeq_device.measure import latency
from edgeq_device.measure.claim import Claim

_COLUMNS = ("p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "mean ms", "CV %", "samples/s", "queries")


def format_bench(report: Mapping[str, Any], *, verbose: bool = False) -> List[str]:
    """Return the report of `run_bench` as text: a compact table for each scenario, the ratios, and the notes. The last
    line is not empty.

    Args:
        verbose: True adds the machine, the settings, and each distribution as a line of bars.
    """
    lines: List[str] = []
    if verbose:
        lines += [*_describe_machine(report), ""]
    for name, scenario in report["scenarios"].items():
        lines += _format_scenario(name, scenario, report, verbose=verbose)
        lines.append("")
    peak = report["process_peak_rss_bytes"]
    # The whole process matters only where a model's own memory is unknown.
    if peak is not None and any(m["memory"] is None for m in report["models"].values()):
        lines.append(f"peak memory of the whole process: {_format_mb(peak)}")
    lines += [f"note: {note}" for note in report["notes"]]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _describe_machine(report: Mapping[str, Any]) -> List[str]:
    machine, settings = report["machine"], report["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    count = settings["threads"]
    threads = f"{count} thread{'s' if count > 1 else ''}" if count else "onnxruntime's choice of threads"
    pin = f", pinned to {','.join(map(str, settings['pin']))}" if settings["pin"] else ""
    return [
        f"{machine['cpu_name']} ({machine['architecture']}), {len(machine['allowed_cores'])} cores",
        *([versions] if versions else []),
        f"{threads}{pin}; at least {settings['min_duration_s']:g} s and {settings['min_queries']} queries each",
    ]


def _format_scenario(name: str, scenario: Mapping[str, Any], report: Mapping[str, Any], *, verbose: bool) -> List[str]:
    models: Dict[str, Any] = scenario["models"]
    with_memory = all(report["models"][m]["memory"] for m in models)
    rows = [["", *_COLUMNS, *(["peak RSS"] if with_memory else [])]]
    for model, result in models.items():
        figures = result["latency"]
        row = [model]
        row += [_format_ms(figures[key]) for key in ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "mean_ms")]
        row += [f"{100 * figures['cv']:.1f}", _format_rate(figures["samples_per_s"]), str(figures["count"])]
        if with_memory:
            row.append(_format_mb(report["models"][model]["memory"]["process_peak_bytes"]))
        rows.append(row)
    lines = [_format_title(name, scenario), *_align_columns(rows)]
    for model, result in models.items():
        if "server" in result:
            lines.append("  " + _format_server(model, result["server"]))
    lines += [
        f"  {Claim.from_record(r).sentence(model, report['baseline'])}" for model, r in scenario["ratios"].items()
    ]
    if verbose:
        edges = scenario["histogram_edges_ms"]
        width = max(len(model) for model in models)
        lines += [
            f"  {model.ljust(width)}  |{latency.draw_sparkline(result['histogram'])}|"
            for model, result in models.items()
        ]
        span = len(next(iter(models.values()))["histogram"])
        low_label, high_label = f"{_format_ms(edges[0])} ms", f"{_format_ms(edges[-1])} ms"
        lines.append(f"  {' ' * width}   {low_label}{high_label.rjust(span - len(low_label))}")
    return lines


def _format_title(name: str, scenario: Mapping[str, Any]) -> str:
    counts = {"p90_ms": "p90", "p99_ms": "p99", "achieved_qps": "the rate", "samples_per_s": "samples/s"}
    size = scenario["samples_per_query"]
    batch = f", batches of {scenario['batch']}" if scenario["batch"] > 1 else ""
    return f"{name}: {size} sample{'s' if size > 1 else ''} a query{batch}; {counts[scenario['metric']]} counts"


def _align_columns(rows: Sequence[Sequence[str]]) -> List[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]


def _format_server(model: str, server: Mapping[str, Any]) -> str:
    verdict = "sustains" if server["valid"] else "does NOT sustain"
    bound = _format_ms(server["latency_bound_ms"])
    return (
        f"{model} {verdict} {_format_rate(server['target_qps'])} queries/s with p99 within {bound} ms"
        f" (achieved {_format_rate(server['achieved_qps'])}, {100 * server['over_bound_share']:.2f} % over the bound)"
    )


def _format_ms(value: float) -> str:
    # About four significant digits.
    digits = 4 if value < 1 else 3 if value < 10 else 2 if value < 100 else 1
    return f"{value:.{digits}f}"


def _format_rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _format_mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
