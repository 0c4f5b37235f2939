from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.errors import DataError, UsageError
from edgeq_device.measure.bench import OFFICIAL_DURATION_S, BenchSettings, bench_lines, parse_settings, run_bench
from edgeq_device.measure.latency import WarmUp
from edgeq_device.measure.scenarios import SCENARIOS

FEEDS = [{"x": np.full((1, 4), i, np.float32)} for i in range(5)]
QUICK = {"min_duration_s": 0.5, "min_queries": 20, "warm_up": WarmUp(window=2, min_s=0.0, max_s=0.1)}


def bench(clock: Any, sessions: dict[str, Any], root: Path, **options: Any) -> dict[str, Any]:
    extra = {k: options.pop(k) for k in ("memory", "versions", "on_progress") if k in options}
    settings = BenchSettings(**{**QUICK, **options})
    return run_bench(sessions, FEEDS, settings, root=root, clock=clock, sleep=clock.sleep, **extra)


@pytest.fixture
def pair(fake_session: Any) -> dict[str, Any]:
    return {"int8": fake_session(0.002), "float32": fake_session(0.004)}


def test_all_scenarios(clock: Any, pair: dict[str, Any], tmp_path: Path) -> None:
    report = bench(clock, pair, tmp_path, scenarios=("single-stream", "multi-stream", "server", "offline"), batch=4)
    scenarios = report["scenarios"]
    assert {n: (s["samples_per_query"], s["batch"], s["metric"]) for n, s in scenarios.items()} == {
        "single-stream": (1, 1, "p90_ms"),
        "multi-stream": (8, 4, "p99_ms"),
        "server": (1, 1, "achieved_qps"),
        "offline": (4, 4, "samples_per_s"),
    }
    for name in ("single-stream", "multi-stream", "offline"):
        assert scenarios[name]["ratios"]["int8"]["estimate"] == pytest.approx(2.0, rel=1e-6)
        assert scenarios[name]["ratios"]["int8"]["confidence"] >= 0.95
    assert scenarios["single-stream"]["models"]["int8"]["metric_value"] == pytest.approx(2.0)
    assert scenarios["multi-stream"]["models"]["float32"]["metric_value"] == pytest.approx(32.0)
    assert scenarios["offline"]["models"]["int8"]["metric_value"] == pytest.approx(500.0, rel=1e-6)
    server = scenarios["server"]["models"]
    assert scenarios["server"]["ratios"] == {}
    assert server["int8"]["server"]["valid"]
    assert server["int8"]["metric_value"] == server["int8"]["server"]["achieved_qps"]
    assert server["int8"]["server"]["latency_bound_ms"] == pytest.approx(40.0)  # ten times the baseline's p50
    assert 250 < server["int8"]["server"]["target_qps"] < 500
    assert 125 < server["float32"]["server"]["target_qps"] < 250


def test_the_report_is_plain_and_its_keys_are_stable(clock: Any, pair: dict[str, Any], tmp_path: Path) -> None:
    report = bench(clock, pair, tmp_path, versions={"onnxruntime": "1.2.3"}, memory={"int8": {"load_bytes": 5}})
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert list(report) == [
        "schema",
        "baseline",
        "settings",
        "machine",
        "versions",
        "models",
        "scenarios",
        "process_peak_rss_bytes",
        "environment",
        "notes",
    ]
    assert report["baseline"] == "float32"
    assert report["models"]["int8"] == {"providers": ["CPUExecutionProvider"], "memory": {"load_bytes": 5}}
    assert report["models"]["float32"]["memory"] is None
    result = report["scenarios"]["single-stream"]["models"]["int8"]
    assert list(result) == ["metric_value", "latency", "warm_up", "histogram"]
    assert sum(result["histogram"]) == result["latency"]["count"] >= 20


def test_both_minima_hold_in_every_scenario(clock: Any, pair: dict[str, Any], tmp_path: Path) -> None:
    report = bench(
        clock, pair, tmp_path, scenarios=("single-stream", "multi-stream", "server", "offline"), min_queries=60
    )
    for name, scenario in report["scenarios"].items():
        for result in scenario["models"].values():
            latency = result["latency"]
            assert latency["count"] >= 60, name
            if name != "server":
                assert latency["count"] * latency["mean_ms"] >= 499, name


def test_a_fixed_rate_is_served_once(clock: Any, fake_session: Any, tmp_path: Path) -> None:
    sessions = {"fast": fake_session(0.002), "slow": fake_session(0.02)}
    report = bench(clock, sessions, tmp_path, scenarios=("server",), target_qps=100.0, latency_bound_ms=60.0)
    results = {n: m["server"] for n, m in report["scenarios"]["server"]["models"].items()}
    assert {n: (r["target_qps"], r["latency_bound_ms"], r["valid"]) for n, r in results.items()} == {
        "fast": (100.0, 60.0, True),
        "slow": (100.0, 60.0, False),
    }
    assert results["slow"]["over_bound_share"] > 0.01
    assert "server: slow did not keep p99 within 60 ms" in report["notes"]


def test_the_first_model_is_the_baseline_where_none_is_float32(clock: Any, fake_session: Any, tmp_path: Path) -> None:
    sessions = {"a": fake_session(0.002), "b": fake_session(0.004)}
    assert list(bench(clock, sessions, tmp_path)["scenarios"]["single-stream"]["ratios"]) == ["b"]
    assert list(bench(clock, sessions, tmp_path, baseline="b")["scenarios"]["single-stream"]["ratios"]) == ["a"]
    with pytest.raises(UsageError, match="baseline 'c'"):
        bench(clock, sessions, tmp_path, baseline="c")


def test_few_queries_and_a_restless_model_are_noted(clock: Any, fake_session: Any, tmp_path: Path) -> None:
    restless = fake_session(0.001)
    run = restless.run

    def slower_and_slower(names: None, feed: dict[str, np.ndarray]) -> Any:
        clock.now += 0.0001 * 1.3 ** min(60, restless.runs)
        return run(names, feed)

    restless.run = slower_and_slower
    notes = bench(clock, {"m": restless}, tmp_path)["notes"]
    assert any(n.startswith("single-stream: m did not become stable") for n in notes)
    assert any("only 20 queries, so p99 and p99.9 are the slowest" in n for n in notes)


def test_samples_that_a_model_refuses_name_model_and_sample(clock: Any, fake_session: Any, tmp_path: Path) -> None:
    feeds = [FEEDS[0], {"x": np.zeros((3, 4), np.float32)}]
    sessions = {"m": fake_session(0.001, fixed_batch=True)}
    with pytest.raises(DataError, match="m refuses sample 1: Got invalid dimensions"):
        run_bench(sessions, feeds, root=tmp_path, clock=clock)


def test_a_model_that_does_not_batch_says_so(clock: Any, fake_session: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"m does not run in batches of 4.*Leave out --batch"):
        bench(clock, {"m": fake_session(0.001, fixed_batch=True)}, tmp_path, scenarios=("offline",), batch=4)


def test_nothing_to_measure() -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        run_bench({}, FEEDS)
    with pytest.raises(DataError, match="no samples"):
        run_bench({"m": object()}, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scenarios": ("sideways",)}, "no scenario 'sideways'.*single-stream"),
        ({"scenarios": ()}, "no scenario"),
        ({"min_duration_s": float("nan")}, "duration of nan"),
        ({"min_duration_s": -1.0}, "duration of -1.0"),
        ({"min_queries": 0}, "queries cannot be 0"),
        ({"batch": 0}, "batch cannot be 0"),
        ({"threads": -1}, "threads cannot be -1"),
        ({"target_qps": 0.0}, "rate cannot be 0.0"),
        ({"latency_bound_ms": float("inf")}, "latency bound cannot be inf"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchSettings(**change).check()


def test_settings_from_options() -> None:
    assert parse_settings(pin="1,3", threads=2, seed=7) == BenchSettings(pin=(1, 3), threads=2, seed=7)
    assert parse_settings(scenario="all").scenarios == tuple(SCENARIOS)
    assert parse_settings(official=True).min_duration_s == OFFICIAL_DURATION_S == 600.0
    assert parse_settings(duration=0.0).min_duration_s == 0.0
    with pytest.raises(UsageError, match="--official and --duration"):
        parse_settings(official=True, duration=1.0)
    with pytest.raises(UsageError, match="no scenario"):
        parse_settings(scenario="")


@pytest.mark.parametrize(
    ("given", "option", "takers"),
    [
        ({"batch": 4}, "--batch", ("offline", "multi-stream")),
        ({"target_qps": 5.0}, "--qps", ("server",)),
        ({"latency_bound_ms": 3.0}, "--latency-bound", ("server",)),
    ],
    ids=str,
)
def test_an_option_of_another_scenario_is_refused(given: dict[str, Any], option: str, takers: tuple[str, ...]) -> None:
    for scenario in SCENARIOS:
        if scenario in takers:
            assert parse_settings(scenario=scenario, **given).scenarios == (scenario,)
        else:
            line = f"{option} has no effect in the {scenario} scenario. .*--scenario {' or '.join(takers)}"
            with pytest.raises(UsageError, match=line):
                parse_settings(scenario=scenario, **given)
    parse_settings(scenario="all", **given)


def test_the_default_is_no_option_of_another_scenario() -> None:
    parse_settings(batch=1, target_qps=None, latency_bound_ms=None)


def test_progress_names_the_scenario_and_reaches_one(clock: Any, pair: dict[str, Any], tmp_path: Path) -> None:
    seen: dict[str, float] = {}
    bench(clock, pair, tmp_path, scenarios=("single-stream", "server"), on_progress=seen.__setitem__)
    assert seen == {"single-stream": 1.0, "server": 1.0}


def test_notes_heat_and_load_of_the_machine(clock: Any, fake_session: Any, tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/thermal/thermal_zone0/temp"
    zone.parent.mkdir(parents=True)
    zone.write_text("40000")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("99.0 1 1 1/1 1\n")
    session = fake_session(0.01)
    run = session.run

    def heating(names: None, feed: dict[str, np.ndarray]) -> Any:
        zone.write_text(str(40_000 + 100 * session.runs))
        return run(names, feed)

    session.run = heating
    report = bench(clock, {"m": session}, tmp_path, min_duration_s=3.0)
    assert any(n.startswith("zone0 warmed from") for n in report["notes"])
    assert any("load average 99.0" in n for n in report["notes"])
    assert report["environment"]["temperature_c"]["zone0"]["max"] > 60


def test_the_same_seed_runs_the_same_queries(clock: Any, fake_session: Any, tmp_path: Path) -> None:
    def fed(seed: int) -> list[float]:
        session, seen = fake_session(0.01), []
        run = session.run
        session.run = lambda names, feed: (seen.append(float(feed["x"][0, 0])), run(names, feed))
        bench(clock, {"m": session}, tmp_path, seed=seed)
        return seen

    assert fed(1) == fed(1) != fed(2)


def test_text_for_people(clock: Any, pair: dict[str, Any], tmp_path: Path) -> None:
    memory = {n: {"process_peak_bytes": 73_400_000} for n in pair}
    report = bench(
        clock, pair, tmp_path, scenarios=("single-stream", "server"), memory=memory, versions={"onnxruntime": "1.2.3"}
    )
    text = "\n".join(bench_lines(report))
    lines = text.splitlines()
    assert lines[0] == "single-stream: 1 sample a query; p90 counts"
    assert lines[1].split("  ")[-1] == "peak RSS"
    assert lines[2].split()[:6] == ["int8", "2.000", "2.000", "2.000", "2.000", "2.000"]
    assert lines[2].endswith("73.4 MB")
    assert "  int8 runs at 2.00 times float32's speed (2.00 to 2.00; 4 → 2 ms)" in lines
    assert "int8 sustains" in text
    assert "|" not in text
    assert all(len(line) < 120 for line in lines if not line.startswith("note:"))
    verbose = "\n".join(bench_lines(report, verbose=True))
    assert "onnxruntime 1.2.3" in verbose
    assert verbose.count("|") == 2 * 2 * 2


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ((0.5, 0.4, 0.8, 0.96, 20), "int8 is SLOWER than float32: 0.50 times its speed (0.40 to 0.80)"),
        ((0.9, 0.74, 1.24, 0.96, 20), "int8 against float32: no difference in speed is settled (0.74 to 1.24)"),
        ((1.53, 1.53, 1.53, 0.0, 1), "the speed is not measurable here: 1 pair of runs are too few to be sure"),
        ((2.0, 1.9, 2.1, 0.94, 5), "int8 against float32: the speed is not measurable here: 5 pairs"),
    ],
)
def test_ratios_are_only_claimed_as_far_as_they_hold(
    clock: Any, pair: dict[str, Any], tmp_path: Path, ratio: tuple[float, ...], expected: str
) -> None:
    report = bench(clock, pair, tmp_path)
    keys = ("estimate", "low", "high", "confidence", "pairs")
    report["scenarios"]["single-stream"]["ratios"]["int8"] = dict(zip(keys, ratio, strict=True))
    assert expected in "\n".join(bench_lines(report))


def test_without_memory_of_each_the_whole_process_is_given(clock: Any, pair: dict[str, Any], tmp_path: Path) -> None:
    report = bench(clock, pair, tmp_path)
    report["process_peak_rss_bytes"] = 50_000_000
    assert "peak memory of the whole process: 50.0 MB" in "\n".join(bench_lines(report))
    assert "peak RSS" not in "\n".join(bench_lines(report))
