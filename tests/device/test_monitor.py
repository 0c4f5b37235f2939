from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edgeq_device.measure.load import CompetingLoad
from edgeq_device.measure.monitor import Monitor, describe_environment

FREQUENCY = "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
ZONE = "sys/class/thermal/thermal_zone0/temp"
CALM: dict[str, Any] = {
    "clock_mhz": {"first": 2400.0, "last": 2400.0, "min": 2380.0, "max": 2400.0},
    "temperature_c": {"zone0 (cpu)": {"first": 50.0, "last": 52.0, "min": 50.0, "max": 55.0}},
    "load_before": 0.2,
    "others_share": 0.02,
    "stolen_share": 0.0,
    "thermal_throttles": 0,
    "quota_throttles": 0,
}


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture(autouse=True)
def its_clock(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeq_device.measure.bench.time.monotonic", clock)


def test_clock_and_temperature_are_followed(tmp_path: Path, clock: Any) -> None:
    write(tmp_path, FREQUENCY, "2400000")
    write(tmp_path, ZONE, "50000")
    monitor = Monitor(root=tmp_path)
    for khz, millidegrees in (("2000000", "70000"), ("1500000", "81000"), ("1800000", "79000")):
        clock.now += 1
        write(tmp_path, FREQUENCY, khz)
        write(tmp_path, ZONE, millidegrees)
        monitor.sample()
    seen = monitor.finish()
    assert seen["clock_mhz"] == {"first": 2400.0, "last": 1800.0, "min": 1500.0, "max": 2400.0}
    assert seen["temperature_c"]["zone0"] == {"first": 50.0, "last": 79.0, "min": 50.0, "max": 81.0}
    notes = describe_environment(seen, 4)
    assert notes == [
        "the clock varied between 1500 and 2400 MHz during the measurement",
        "zone0 warmed from 50 to 81 degrees C",
    ]


def test_it_reads_at_most_twice_a_second(tmp_path: Path, clock: Any) -> None:
    write(tmp_path, FREQUENCY, "2400000")
    monitor = Monitor(root=tmp_path)
    for _ in range(100):
        clock.now += 0.01
        monitor.sample()
    assert len(monitor.mhz) <= 3


def test_the_busiest_core_stands_for_the_clock(tmp_path: Path, clock: Any) -> None:
    write(tmp_path, FREQUENCY, "800000")
    write(tmp_path, FREQUENCY.replace("cpu0", "cpu1"), "3000000")
    assert Monitor(root=tmp_path).finish()["clock_mhz"]["max"] == 3000.0


def test_work_of_others_and_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    own = iter([5.0, 6.0])
    write(tmp_path, "proc/stat", "cpu  1000 0 0 1000 0 0 0 0 0 0\n")
    others = CompetingLoad(root=tmp_path, own_cpu_s=lambda: next(own))
    # of 400 ticks, 160 are busy, and 100 of these are ours
    write(tmp_path, "proc/stat", "cpu  1160 0 0 1200 0 0 0 40 0 0\n")
    assert others.measure_share() == pytest.approx(0.15)
    assert others.measure_stolen_share() == pytest.approx(0.1)


def test_a_system_that_shows_nothing_gives_nulls_and_no_notes(tmp_path: Path, clock: Any) -> None:
    seen = Monitor(root=tmp_path).finish()
    assert seen == {
        "clock_mhz": None,
        "temperature_c": {},
        "load_before": None,
        "others_share": None,
        "stolen_share": None,
        "thermal_throttles": None,
        "quota_throttles": None,
    }
    assert describe_environment(seen, 4) == []


def test_counts_are_of_the_measurement_only(tmp_path: Path, clock: Any) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.stat", "nr_throttled 10\n")
    monitor = Monitor(root=tmp_path)
    write(tmp_path, "sys/fs/cgroup/cpu.stat", "nr_throttled 13\n")
    seen = monitor.finish()
    assert seen["quota_throttles"] == 3
    assert describe_environment(seen, 4) == ["the container's CPU quota throttled the process in 3 periods"]


def test_a_calm_machine_gives_no_notes() -> None:
    assert describe_environment(CALM, 4) == []


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"load_before": 3.0}, "load average 3.0 on 4 cores"),
        ({"others_share": 0.4}, "other processes used 40%"),
        ({"stolen_share": 0.05}, "host took 5%"),
        ({"thermal_throttles": 2}, "throttled for heat 2 times"),
    ],
)
def test_each_disturbance_is_noted(change: dict[str, Any], note: str) -> None:
    (only,) = describe_environment({**CALM, **change}, 4)
    assert note in only
