"""A benchmark's report as text for people."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from edgeq_device.claim import Claim
from edgeq_device.distribution import sparkline

_COLUMNS = ("p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "mean ms", "CV %", "samples/s", "queries")


def format_bench(report: Mapping[str, Any], *, verbose: bool = False) -> str:
    """`bench_lines` as one text."""
    return "\n".join(bench_lines(report, verbose=verbose))


def bench_lines(report: Mapping[str, Any], *, verbose: bool = False) -> List[str]:
    """The report of `run_bench` as a compact table a scenario, the ratios, and the notes; none is empty at the end.

    Args:
        verbose: add the distributions as lines of bars, and what was measured on.
    """
    lines: List[str] = []
    if verbose:
        lines += [*_machine(report), ""]
    for name, scenario in report["scenarios"].items():
        lines += _scenario(name, scenario, report, verbose=verbose)
        lines.append("")
    peak = report["process_peak_rss_bytes"]
    if peak is not None and any(m["memory"] is None for m in report["models"].values()):
        lines.append(f"peak memory of the whole process: {_mb(peak)}")
    lines += [f"note: {note}" for note in report["notes"]]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _machine(report: Mapping[str, Any]) -> List[str]:
    machine, settings = report["machine"], report["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    count = settings["threads"]
    threads = f"{count} thread{'s' if count > 1 else ''}" if count else "onnxruntime's choice of threads"
    pin = f", pinned to {','.join(map(str, settings['pin']))}" if settings["pin"] else ""
    return [
        f"{machine['cpu']} ({machine['architecture']}), {len(machine['allowed_cores'])} cores",
        *([versions] if versions else []),
        f"{threads}{pin}; at least {settings['min_duration_s']:g} s and {settings['min_queries']} queries each",
    ]


def _scenario(name: str, scenario: Mapping[str, Any], report: Mapping[str, Any], *, verbose: bool) -> List[str]:
    models: Dict[str, Any] = scenario["models"]
    with_memory = all(report["models"][m]["memory"] for m in models)
    rows = [["", *_COLUMNS, *(["peak RSS"] if with_memory else [])]]
    for model, result in models.items():
        figures = result["latency"]
        row = [model]
        row += [_ms(figures[key]) for key in ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "mean_ms")]
        row += [f"{100 * figures['cv']:.1f}", _rate(figures["samples_per_s"]), str(figures["count"])]
        if with_memory:
            row.append(_mb(report["models"][model]["memory"]["process_peak_bytes"]))
        rows.append(row)
    lines = [_title(name, scenario), *_table(rows)]
    for model, result in models.items():
        if "server" in result:
            lines.append("  " + _server(model, result["server"]))
    lines += [f"  {Claim.read(r).sentence(model, report['baseline'])}" for model, r in scenario["ratios"].items()]
    if verbose:
        edges = scenario["histogram_edges_ms"]
        width = max(len(model) for model in models)
        lines += [f"  {model.ljust(width)}  |{sparkline(result['histogram'])}|" for model, result in models.items()]
        span = len(next(iter(models.values()))["histogram"])
        left, right = f"{_ms(edges[0])} ms", f"{_ms(edges[-1])} ms"
        lines.append(f"  {' ' * width}   {left}{right.rjust(span - len(left))}")
    return lines


def _title(name: str, scenario: Mapping[str, Any]) -> str:
    counts = {"p90_ms": "p90", "p99_ms": "p99", "achieved_qps": "the rate", "samples_per_s": "samples/s"}
    size = scenario["samples_per_query"]
    batch = f", batches of {scenario['batch']}" if scenario["batch"] > 1 else ""
    return f"{name}: {size} sample{'s' if size > 1 else ''} a query{batch}; {counts[scenario['metric']]} counts"


def _table(rows: Sequence[Sequence[str]]) -> List[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]


def _server(model: str, server: Mapping[str, Any]) -> str:
    verdict = "sustains" if server["valid"] else "does NOT sustain"
    bound = _ms(server["latency_bound_ms"])
    return (
        f"{model} {verdict} {_rate(server['target_qps'])} queries/s with p99 within {bound} ms"
        f" (achieved {_rate(server['achieved_qps'])}, {100 * server['over_bound_share']:.2f} % over the bound)"
    )


def _ms(value: float) -> str:
    digits = 4 if value < 1 else 3 if value < 10 else 2 if value < 100 else 1
    return f"{value:.{digits}f}"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
