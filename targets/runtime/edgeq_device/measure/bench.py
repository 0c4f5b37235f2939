"""Benchmark several sessions together: warm up, run the scenarios, watch the machine, and return one report.

`edgeq bench` on a workstation and `edgeq_run.py bench` on a device both use `run_bench` and `format_bench`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.errors import DataError, UsageError
from edgeq_device.measure import environment, latency, scenarios
from edgeq_device.measure.claim import Claim, make_claim
from edgeq_device.measure.environment import CompetingLoad, parse_cores
from edgeq_device.measure.features import ROOT, read_allowed_cores
from edgeq_device.measure.latency import WarmUp

OFFICIAL_DURATION_S = 600.0
BOUND_FACTOR = 10.0
"""Default latency bound of the server scenario, as a multiple of the baseline's median latency."""
ALL = "all"
"""Name that selects all scenarios on a command line."""
_TAKEN_BY = {
    "batch": ("--batch", (scenarios.OFFLINE.name, scenarios.MULTI_STREAM.name)),
    "target_qps": ("--qps", (scenarios.SERVER.name,)),
    "latency_bound_ms": ("--latency-bound", (scenarios.SERVER.name,)),
}
"""Fields of `BenchSettings` that apply only to some scenarios, each with its option and the names of the scenarios."""


@dataclass(frozen=True)
class BenchSettings:
    """Set how models are measured.

    Attributes:
        scenarios: names from `SCENARIOS`.
        min_duration_s, min_queries: minimum number of seconds and of queries for each model in each scenario; both must
            be reached. MLPerf's official duration is 600 s (`OFFICIAL_DURATION_S`), but two seconds are enough for a
            ratio on a workstation.
        seed: seed for the order of the samples, the order of the models in a round, and the arrival times.
        batch: number of samples stacked along axis 0 into one run, in the offline and multi-stream scenarios.
        target_qps: arrival rate of the server scenario; None searches for the highest rate that keeps the latency
            bound.
        latency_bound_ms: bound on p99 in the server scenario; None uses `BOUND_FACTOR` times the baseline's p50.
        baseline: model that the others are compared with; "" selects "float32" if present, else the first model.
        threads, pin: number of intra-op threads (0: onnxruntime's choice) and cores with which the caller opened the
            sessions; `run_bench` only records them.
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
        """Check that the values make sense.

        Raises:
            UsageError: a value makes no sense; the message names the setting.
        """
        unknown = [s for s in self.scenarios if s not in scenarios.SCENARIOS]
        if unknown or not self.scenarios:
            name = unknown[0] if unknown else ""
            raise UsageError(f"there is no scenario {name!r}", f"Choose from {', '.join(scenarios.SCENARIOS)}")
        if not 0 <= self.min_duration_s <= 86_400:
            raise UsageError(f"a duration of {self.min_duration_s} s makes no sense", "Give 0 to 86400 seconds")
        for name, number, limit in (("queries", self.min_queries, 10**8), ("batch", self.batch, 65_536)):
            if not 1 <= number <= limit:
                raise UsageError(f"{name} cannot be {number}", f"Give 1 to {limit}")
        if self.threads < 0:
            raise UsageError(f"threads cannot be {self.threads}", "Give 0 (onnxruntime's choice) or more")
        for name, value in (("rate", self.target_qps), ("latency bound", self.latency_bound_ms)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"the {name} cannot be {value}", "Give a positive number")

    def to_dict(self) -> Dict[str, Any]:
        """Return the settings as plain JSON values. Durations are in seconds, the latency bound is in milliseconds, and
        the rate is in queries a second.
        """
        fields = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        return {key: value for key, value in fields.items() if key not in ("baseline", "warm_up")}


def parse_settings(
    *,
    scenario: str = "single-stream",
    duration: Optional[float] = None,
    official: bool = False,
    pin: Optional[str] = None,
    **fields: Any,
) -> BenchSettings:
    """Return checked settings from the options of a command line.

    Args:
        scenario: name of a scenario, or "all".
        duration, official: minimum seconds, or True for MLPerf's 600; only one of the two may be given.
        pin: cores, as text such as "0,2-3".
        fields: other fields of `BenchSettings`.

    Raises:
        UsageError: a value makes no sense, or an option has no effect in the scenario.
    """
    if official and duration is not None:
        raise UsageError("--official and --duration both set the duration", "Leave one out")
    if duration is None:
        duration = OFFICIAL_DURATION_S if official else BenchSettings.min_duration_s
    settings = BenchSettings(
        scenarios=tuple(scenarios.SCENARIOS) if scenario == ALL else (scenario,),
        min_duration_s=duration,
        pin=parse_cores(pin) if pin is not None else (),
        **fields,
    )
    settings.check()
    for name, (option, takers) in _TAKEN_BY.items():
        is_set = getattr(settings, name) != getattr(BenchSettings, name)
        if is_set and not set(takers) & set(settings.scenarios):
            problem = f"{option} has no effect in the {scenario} scenario"
            raise UsageError(problem, f"Leave it out, or choose --scenario {' or '.join(takers)}")
    return settings


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
    digits = 4 if value < 1 else 3 if value < 10 else 2 if value < 100 else 1
    return f"{value:.{digits}f}"


def _format_rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _format_mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


CLOCK_MOVED = 0.05
"""Relative change of the clock that is worth a note."""
WARMED_C = 10.0
"""Rise in degrees Celsius that is worth a note."""
_INTERVAL_S = 0.5
DISTURBED = 0.1
"""Smallest share of the machine's time that others used, and smallest load per core before the start, worth a note."""


class Monitor:
    """Record clocks, temperatures and load during a measurement. Call `sample` between bursts.

    The monitor reads at most twice a second, because each reading takes time. Create it after the warm-up: idle cores
    have a low clock, and the rise from there would look like a disturbance.
    """

    def __init__(self, *, root: Path = ROOT, load_before: Optional[float] = None) -> None:
        self._root = root
        self.load_before = load_before
        self.mhz: List[float] = []
        self.celsius: Dict[str, List[float]] = {}
        self._competing = CompetingLoad(root=root)
        self._throttles_first = environment.read_throttle_count(root)
        self._quota_first = environment.read_quota_throttles(root)
        self._take_reading()

    def sample(self) -> None:
        """Read clocks and temperatures, unless the last reading is less than half a second old."""
        if time.monotonic() - self._last_reading >= _INTERVAL_S:
            self._take_reading()

    def _take_reading(self) -> None:
        frequencies = environment.read_frequencies(self._root)
        if frequencies:
            # Record the highest clock, which is that of the core that has just worked. The clocks of idle cores carry
            # no information.
            self.mhz.append(max(frequencies.values()))
        for zone, celsius in environment.read_temperatures(self._root).items():
            self.celsius.setdefault(zone, []).append(celsius)
        self._last_reading = time.monotonic()

    def finish(self) -> Dict[str, Any]:
        """Take a last reading and return the whole record under stable names. A value is None if the system does not
        report it.
        """
        self._take_reading()
        return {
            "clock_mhz": _summarize_range(self.mhz),
            "temperature_c": {zone: _summarize_range(values) for zone, values in sorted(self.celsius.items())},
            "load_before": self.load_before,
            "others_share": self._competing.measure_share(),
            "stolen_share": self._competing.measure_stolen_share(),
            "thermal_throttles": _subtract(self._throttles_first, environment.read_throttle_count(self._root)),
            "quota_throttles": _subtract(self._quota_first, environment.read_quota_throttles(self._root)),
        }


def _summarize_range(values: List[float]) -> Optional[Dict[str, float]]:
    return {"first": values[0], "last": values[-1], "min": min(values), "max": max(values)} if values else None


def _subtract(start: Optional[int], end: Optional[int]) -> Optional[int]:
    return None if start is None or end is None else end - start


def describe_environment(readings: Dict[str, Any], cores: int) -> List[str]:
    """Return one sentence for each recorded condition that may have changed the figures. `readings` is the record that
    `Monitor.finish` returns.

    Args:
        cores: number of logical cores that the load is compared with.
    """
    notes = []
    mhz = readings["clock_mhz"]
    if mhz and mhz["max"] > 0 and (mhz["max"] - mhz["min"]) / mhz["max"] > CLOCK_MOVED:
        notes.append(f"the clock varied between {mhz['min']:.0f} and {mhz['max']:.0f} MHz during the measurement")
    for zone, celsius in readings["temperature_c"].items():
        if celsius["max"] - celsius["first"] >= WARMED_C:
            notes.append(f"{zone} warmed from {celsius['first']:.0f} to {celsius['max']:.0f} degrees C")
    if readings["thermal_throttles"]:
        notes.append(f"cores were throttled for heat {readings['thermal_throttles']} times during the measurement")
    if readings["quota_throttles"]:
        notes.append(f"the container's CPU quota throttled the process in {readings['quota_throttles']} periods")
    load = readings["load_before"]
    if load is not None and load > max(0.5, DISTURBED * cores):
        cores_text = f"{cores} core{'s' if cores > 1 else ''}"
        notes.append(f"the machine was loaded before the start (load average {load:.1f} on {cores_text})")
    if readings["others_share"] is not None and readings["others_share"] > DISTURBED:
        notes.append(f"other processes used {readings['others_share']:.0%} of the machine during the measurement")
    if readings["stolen_share"] is not None and readings["stolen_share"] > 0.01:
        notes.append(f"the virtual machine's host took {readings['stolen_share']:.0%} of the processor time")
    return notes


SCHEMA = "edgeq.bench/2"
_SERVED = ("target_qps", "achieved_qps", "latency_bound_ms", "over_bound_share", "valid")
Report = Dict[str, Any]
OnProgress = Callable[[str, float], None]


def run_bench(
    sessions: Mapping[str, Any],
    feeds: Sequence[scenarios.Feed],
    settings: Optional[BenchSettings] = None,
    *,
    more: Optional[Mapping[str, Sequence[Any]]] = None,
    memory: Optional[Mapping[str, Mapping[str, int]]] = None,
    versions: Optional[Mapping[str, str]] = None,
    root: Path = ROOT,
    clock: latency.Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    on_progress: OnProgress = lambda scenario, share: None,
) -> Report:
    """Measure `sessions` side by side. A session is an onnxruntime session, or any other object that has the methods
    `run` and `get_providers`.

    Args:
        feeds: the fixed set of samples that the queries draw from; every session must accept all of them.
        more: further sessions of the same models, keyed by session name. They take turns with the session of that name.
        memory: `MemoryUse.to_dict()` of each session whose memory the caller has measured, keyed by session name.
        versions: versions of the software that the sessions run on, for the record.

    Returns:
        A report of plain values. docs/reference/bench.md lists its keys, and `format_bench` renders it.

    Raises:
        UsageError: the settings make no sense.
        DataError: there are no samples, or a session refuses one.
    """
    settings = settings or BenchSettings()
    settings.check()
    if not sessions:
        raise UsageError("there is nothing to measure", "Give a model")
    baseline = settings.baseline or ("float32" if "float32" in sessions else next(iter(sessions)))
    if baseline not in sessions:
        raise UsageError(f"the baseline {baseline!r} is not among the models", f"Choose from {', '.join(sessions)}")
    load_before = environment.read_load(root)
    _try_out(sessions, feeds)

    groups = {name: [session, *(more or {}).get(name, ())] for name, session in sessions.items()}
    bench = _Bench(groups, feeds, settings, baseline, clock, sleep, on_progress)
    notes: List[str] = []
    # Warm up once before the monitor starts. Otherwise the rise from the idle clock would be mistaken for a
    # disturbance.
    bench.warm(
        {name: [scenarios.make_runner(s, feeds, seed=settings.seed) for s in group] for name, group in groups.items()}
    )
    monitor = bench.monitor = Monitor(root=root, load_before=load_before)
    results = {name: bench.run_scenario(scenarios.SCENARIOS[name], notes) for name in settings.scenarios}
    readings = monitor.finish()
    notes += describe_environment(readings, len(read_allowed_cores()))
    return {
        "schema": SCHEMA,
        "baseline": baseline,
        "settings": settings.to_dict(),
        "machine": environment.describe_machine(root),
        "versions": dict(versions or {}),
        "models": {
            name: {"providers": list(session.get_providers()), "memory": dict((memory or {}).get(name, {})) or None}
            for name, session in sessions.items()
        },
        "scenarios": results,
        "process_peak_rss_bytes": environment.read_memory(root)[1],
        "environment": readings,
        "notes": notes,
    }


def _try_out(sessions: Mapping[str, Any], feeds: Sequence[scenarios.Feed]) -> None:
    """Run one sample of each shape in each session. If a sample does not fit, raise an error that names the sample.
    Otherwise the benchmark would crash later.
    """
    if not feeds:
        raise DataError("there are no samples to run", "Give data with at least one sample")
    shapes_seen: Dict[Tuple[Tuple[str, Tuple[int, ...]], ...], int] = {}
    for index, feed in enumerate(feeds):
        shapes_seen.setdefault(tuple((k, np.shape(v)) for k, v in sorted(feed.items())), index)
    for name, session in sessions.items():
        for index in shapes_seen.values():
            try:
                session.run(None, dict(feeds[index]))
            except Exception as error:  # onnxruntime raises a dozen unrelated types here
                text = " ".join(str(error).split()).rstrip(".")
                raise DataError(
                    f"{name} refuses sample {index}: {text}",
                    "Give inputs that fit the model: --data, or --shape if its sizes are open",
                ) from error


@dataclass
class _Bench:
    """Hold the sessions, samples and settings that the scenarios of one benchmark share. `monitor` is None during the
    first warm-up.
    """

    sessions: Mapping[str, Sequence[Any]]
    feeds: Sequence[scenarios.Feed]
    settings: BenchSettings
    baseline: str
    clock: latency.Clock
    sleep: Callable[[float], None]
    on_progress: OnProgress
    monitor: Optional[Monitor] = None

    def warm(self, runners: Mapping[str, Sequence[latency.Runner]]) -> Dict[str, latency.WarmedUp]:
        """Warm up each model until its latency is stable or time runs out, and then warm up its further sessions.
        Return the number of runs and the seconds for each model.
        """
        warmed = {
            name: latency.warm_up(group[0], self.settings.warm_up, clock=self.clock) for name, group in runners.items()
        }
        latency.warm_up_all([group[1:] for group in runners.values() if group[1:]], self.settings.warm_up, self.clock)
        return warmed

    def run_scenario(self, scenario: scenarios.Scenario, notes: List[str]) -> Report:
        """Measure every model in one scenario. Return the scenario's figures as JSON values, with latencies in
        milliseconds.

        Problems that do not stop the measurement are appended to `notes`.

        Raises:
            UsageError: a model does not run in batches of the size in the settings.
        """
        batch = self.settings.batch if scenario.name in ("offline", "multi-stream") else 1
        per_query = batch if scenario is scenarios.OFFLINE else scenario.samples_per_query
        runners = self._open_runners(per_query, batch)
        warmed = self.warm(runners)
        notes += [
            f"{scenario.name}: {name} did not become stable within {w.seconds:.1f} s of warm-up"
            for name, w in warmed.items()
            if not w.stable
        ]
        models: Dict[str, Report] = {name: {} for name in runners}
        claims: Dict[str, Claim] = {}
        if scenario is scenarios.SERVER:
            served = self._run_server({name: group[0] for name, group in runners.items()})
            distributions = {name: result.latency for name, result in served.items()}
            for name, result in served.items():
                models[name]["server"] = {key: getattr(result, key) for key in _SERVED}
                if not result.valid:
                    notes.append(f"server: {name} did not keep p99 within {result.latency_bound_ms:.3g} ms")
        else:
            distributions = latency.measure_interleaved(
                runners,
                min_duration_s=self.settings.min_duration_s,
                min_runs=self.settings.min_queries,
                patience_s=self.settings.min_duration_s,
                seed=self.settings.seed,
                samples_per_query=per_query,
                clock=self.clock,
                on_progress=lambda share: self._report_progress(scenario.name, share),
            )
            base = distributions[self.baseline]
            claims = {name: make_claim(base, d) for name, d in distributions.items() if name != self.baseline}
        edges = latency.compute_shared_edges(list(distributions.values()))
        for name, distribution in distributions.items():
            summary = distribution.to_dict()
            figures = {**summary, **models[name].get("server", {})}
            models[name]["metric_value"] = figures[scenario.metric]
            models[name]["latency"] = summary
            models[name]["warm_up"] = {"runs": warmed[name].runs, "stable": warmed[name].stable}
            models[name]["histogram"] = latency.count_bins(distribution, edges)
        notes += _describe_small_samples(scenario, distributions)
        return {
            "metric": scenario.metric,
            "samples_per_query": per_query,
            "batch": batch,
            "models": models,
            "ratios": {name: c.to_dict() for name, c in claims.items()},
            "histogram_edges_ms": [float(e) for e in edges],
        }

    def _open_runners(self, per_query: int, batch: int) -> Dict[str, List[latency.Runner]]:
        runners = {}
        for name, sessions in self.sessions.items():
            try:
                group = [
                    scenarios.make_runner(
                        s, self.feeds, samples_per_query=per_query, batch=batch, seed=self.settings.seed
                    )
                    for s in sessions
                ]
                group[0]()
            except Exception as error:  # single samples ran, so the model fails on stacked ones
                if batch == 1:
                    raise
                text = " ".join(str(error).split()).rstrip(".")
                raise UsageError(f"{name} does not run in batches of {batch}: {text}", "Leave out --batch") from error
            runners[name] = group
        return runners

    def _run_server(self, runners: Mapping[str, latency.Runner]) -> Dict[str, scenarios.ServerResult]:
        """Run the server scenario for one model at a time, because each stream of arrivals needs the whole machine."""
        settings = self.settings
        short = min(1.0, settings.min_duration_s)
        alone = latency.measure_interleaved(
            runners, min_duration_s=short, min_runs=min(50, settings.min_queries), seed=settings.seed, clock=self.clock
        )
        bound = settings.latency_bound_ms or BOUND_FACTOR * alone[self.baseline].p50
        results = {}
        for position, (name, run) in enumerate(runners.items()):

            def serve_at(
                rate: float, seconds: float, run: latency.Runner = run, position: int = position
            ) -> scenarios.ServerResult:
                """Serve at `rate` queries a second for `seconds`."""
                return scenarios.run_server(
                    run,
                    rate_qps=rate,
                    latency_bound_ms=bound,
                    min_duration_s=seconds,
                    min_queries=settings.min_queries,
                    seed=settings.seed,
                    clock=self.clock,
                    sleep=self.sleep,
                    on_progress=lambda share: self._report_progress(
                        scenarios.SERVER.name, (position + share) / len(runners)
                    ),
                )

            if settings.target_qps is not None:
                results[name] = serve_at(settings.target_qps, settings.min_duration_s)
            else:
                service_s = alone[name].samples_ms / 1e3
                results[name] = scenarios.find_max_rate(
                    serve_at, service_s, bound, full_s=settings.min_duration_s, seed=settings.seed
                )
        return results

    def _report_progress(self, scenario: str, share: float) -> None:
        if self.monitor is not None:
            self.monitor.sample()
        self.on_progress(scenario, share)


def _describe_small_samples(
    scenario: scenarios.Scenario, distributions: Mapping[str, latency.Distribution]
) -> List[str]:
    fewest = min(d.count for d in distributions.values())
    if fewest >= 1000:
        return []
    figure = "p99.9 is" if fewest >= 100 else "p99 and p99.9 are" if fewest >= 10 else "p90 to p99.9 are"
    return [f"{scenario.name}: only {fewest} queries, so {figure} the slowest of them; a longer --duration gives more"]
