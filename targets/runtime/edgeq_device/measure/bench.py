"""Benchmark several sessions together: warm up, run the scenarios, watch the machine, and return one report.

`edgeq bench` on a workstation and `edgeq_run.py bench` on a device both use `run_bench` and `format_bench`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.errors import DataError, UsageError
from edgeq_device.measure import environment, latency, machine, scenarios
from edgeq_device.measure.bench_settings import BOUND_FACTOR, BenchSettings
from edgeq_device.measure.claim import Claim, make_claim
from edgeq_device.measure.monitor import Monitor, describe_environment
from edgeq_device.system.features import ROOT, read_allowed_cores

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
    # Before anything runs, because the first tries raise the load.
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
        "machine": machine.describe_machine(root),
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
        # Only these scenarios have several samples in a query.
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
            # Server runs are not interleaved, so only here can latencies be compared in pairs.
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
                # A query outside of the timing shows whether the model accepts the batch.
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
        # The service times without queueing are the start of the search.
        short = min(1.0, settings.min_duration_s)
        alone = latency.measure_interleaved(
            runners, min_duration_s=short, min_runs=min(50, settings.min_queries), seed=settings.seed, clock=self.clock
        )
        bound = settings.latency_bound_ms or BOUND_FACTOR * alone[self.baseline].p50
        results = {}
        for position, (name, run) in enumerate(runners.items()):

            def serve_at(
                # The defaults bind the values of this turn of the loop.
                rate: float,
                seconds: float,
                run: latency.Runner = run,
                position: int = position,
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
    # Of n queries, the percentile 1 - 1/n is the slowest one.
    figure = "p99.9 is" if fewest >= 100 else "p99 and p99.9 are" if fewest >= 10 else "p90 to p99.9 are"
    return [f"{scenario.name}: only {fewest} queries, so {figure} the slowest of them; a longer --duration gives more"]
