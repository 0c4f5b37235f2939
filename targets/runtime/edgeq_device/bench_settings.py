"""How a benchmark is to be done: settings as a value, and from command-line options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from edgeq_device.claim import Claim
from edgeq_device.environment import parse_cores
from edgeq_device.errors import UsageError
from edgeq_device.latency import WarmUp, sparkline
from edgeq_device.scenarios import MULTI_STREAM, OFFLINE, SCENARIOS, SERVER

OFFICIAL_DURATION_S = 600.0
BOUND_FACTOR = 10.0
"""Where no latency bound is given, the server scenario's is this times the baseline's median latency."""
ALL = "all"
"""Stands for all scenarios on a command line."""
_TAKEN_BY = {
    "batch": ("--batch", (OFFLINE.name, MULTI_STREAM.name)),
    "target_qps": ("--qps", (SERVER.name,)),
    "latency_bound_ms": ("--latency-bound", (SERVER.name,)),
}
"""Fields of `BenchSettings` that not every scenario takes: the option, and the scenarios that do."""


@dataclass(frozen=True)
class BenchSettings:
    """How to measure.

    Attributes:
        scenarios: names from `SCENARIOS`.
        min_duration_s, min_queries: both are met by every model in every scenario. MLPerf's official duration is
            600 s (`OFFICIAL_DURATION_S`); two seconds settle a ratio on a workstation.
        seed: of the sample order, the order of models in a round, and the arrivals.
        batch: samples stacked along axis 0 into one run, in the offline and multi-stream scenarios.
        target_qps: arrival rate of the server scenario; None searches the highest that the bound allows.
        latency_bound_ms: on the server scenario's p99; None takes `BOUND_FACTOR` times the baseline's p50.
        baseline: the model that the others are compared with; "" takes "float32", else the first.
        threads, pin: what the sessions were opened with, for the record: intra-op threads (0: onnxruntime's choice)
            and cores.
    """

    scenarios: Tuple[str, ...] = ("single-stream",)
    min_duration_s: float = 2.0
    min_queries: int = 100
    seed: int = 0
    batch: int = 1
    target_qps: Optional[float] = None
    latency_bound_ms: Optional[float] = None
    baseline: str = ""
    threads: int = 0
    pin: Tuple[int, ...] = ()
    warm_up: WarmUp = field(default_factory=WarmUp)

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            UsageError: naming the setting.
        """
        unknown = [s for s in self.scenarios if s not in SCENARIOS]
        if unknown or not self.scenarios:
            name = unknown[0] if unknown else ""
            raise UsageError(f"there is no scenario {name!r}", f"Choose from {', '.join(SCENARIOS)}")
        if not 0 <= self.min_duration_s <= 86_400:
            raise UsageError(f"a duration of {self.min_duration_s} s makes no sense", "Give 0 to 86400 seconds")
        for name, number, most in (("queries", self.min_queries, 10**8), ("batch", self.batch, 65_536)):
            if not 1 <= number <= most:
                raise UsageError(f"{name} cannot be {number}", f"Give 1 to {most}")
        if self.threads < 0:
            raise UsageError(f"threads cannot be {self.threads}", "Give 0 (onnxruntime's choice) or more")
        for name, value in (("rate", self.target_qps), ("latency bound", self.latency_bound_ms)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"the {name} cannot be {value}", "Give a positive number")

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON values: durations in seconds, the latency bound in milliseconds, the rate in queries a second."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        return {key: value for key, value in plain.items() if key not in ("baseline", "warm_up")}


def parse_settings(
    *,
    scenario: str = "single-stream",
    duration: Optional[float] = None,
    official: bool = False,
    pin: Optional[str] = None,
    **others: Any,
) -> BenchSettings:
    """Settings from options; checked.

    Args:
        scenario: a name, or "all".
        duration, official: seconds, or MLPerf's 600; not both.
        pin: cores as "0,2-3".
        others: further fields of `BenchSettings`.

    Raises:
        UsageError: what makes no sense, or an option that says nothing in the scenario.
    """
    if official and duration is not None:
        raise UsageError("--official and --duration both say how long to measure", "Leave one out")
    if duration is None:
        duration = OFFICIAL_DURATION_S if official else BenchSettings.min_duration_s
    settings = BenchSettings(
        scenarios=tuple(SCENARIOS) if scenario == ALL else (scenario,),
        min_duration_s=duration,
        pin=parse_cores(pin) if pin is not None else (),
        **others,
    )
    settings.check()
    for name, (option, takers) in _TAKEN_BY.items():
        given = getattr(settings, name) != getattr(BenchSettings, name)
        if given and not set(takers) & set(settings.scenarios):
            problem = f"{option} says nothing in the {scenario} scenario"
            raise UsageError(problem, f"Leave it out, or choose --scenario {' or '.join(takers)}")
    return settings


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
