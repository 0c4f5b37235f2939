from __future__ import annotations

import os
from pathlib import Path

import pytest
from edgeq_device.errors import UsageError
from edgeq_device.measure import environment


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


CPU = "sys/devices/system/cpu"


def test_a_system_that_shows_nothing_is_not_guessed_at(tmp_path: Path) -> None:
    assert environment.read_frequencies(tmp_path) == {}
    assert environment.read_temperatures(tmp_path) == {}
    assert environment.read_governors(tmp_path) == ()
    assert environment.read_throttle_count(tmp_path) is None
    assert environment.read_quota_throttles(tmp_path) is None
    assert environment.read_load(tmp_path) is None
    assert environment.read_cpu_times(tmp_path) is None


def test_frequencies_come_from_cpufreq_and_else_from_cpuinfo(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": "processor: 0\ncpu MHz\t\t: 2596.142\ncpu MHz\t\t: 3100.5\n"})
    assert environment.read_frequencies(tmp_path) == {0: 2596.142, 1: 3100.5}
    write(
        tmp_path,
        {f"{CPU}/cpu10/cpufreq/scaling_cur_freq": "1800000\n", f"{CPU}/cpu2/cpufreq/scaling_cur_freq": "2400000\n"},
    )
    assert environment.read_frequencies(tmp_path) == {2: 2400.0, 10: 1800.0}


def test_garbled_files_are_as_good_as_absent(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            f"{CPU}/cpu0/cpufreq/scaling_cur_freq": "<unknown>\n",
            "sys/class/thermal/thermal_zone0/temp": "",
            "proc/loadavg": "",
            "proc/stat": "intr 1 2 3\n",
        },
    )
    assert environment.read_frequencies(tmp_path) == {}
    assert environment.read_temperatures(tmp_path) == {}
    assert environment.read_load(tmp_path) is None
    assert environment.read_cpu_times(tmp_path) is None


def test_governors_are_listed_once(tmp_path: Path) -> None:
    names = {f"{CPU}/cpu{i}/cpufreq/scaling_governor": g + "\n" for i, g in enumerate(["powersave", "performance"] * 2)}
    assert environment.read_governors(write(tmp_path, names)) == ("performance", "powersave")


def test_temperatures_by_zone_leave_out_sensors_that_are_off(tmp_path: Path) -> None:
    zones = "sys/class/thermal/thermal_zone"
    write(
        tmp_path,
        {f"{zones}0/temp": "48312\n", f"{zones}0/type": "cpu-thermal\n", f"{zones}1/temp": "-274000\n"},
    )
    write(tmp_path, {f"{zones}2/temp": "51000\n"})
    assert environment.read_temperatures(tmp_path) == {"zone0 (cpu-thermal)": 48.312, "zone2": 51.0}


def test_throttle_counts(tmp_path: Path) -> None:
    write(tmp_path, {f"{CPU}/cpu{i}/thermal_throttle/core_throttle_count": f"{i + 1}\n" for i in range(3)})
    assert environment.read_throttle_count(tmp_path) == 6
    write(tmp_path, {"sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_periods 10\nnr_throttled 4\nthrottled_usec 9\n"})
    assert environment.read_quota_throttles(tmp_path) == 4


def test_load_and_cpu_times(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"proc/loadavg": "1.50 0.9 0.7 3/109 7533\n", "proc/stat": "cpu  10 1 20 300 40 2 3 24 7 0\ncpu0 1 2\n"},
    )
    assert environment.read_load(tmp_path) == 1.5
    assert environment.read_cpu_times(tmp_path) == environment.CpuTimes(total=400, work=36, stolen=24)


def test_runnable_threads(tmp_path: Path) -> None:
    assert environment.read_runnable(tmp_path) is None
    write(tmp_path, {"proc/stat": "cpu  10 1 20 300\nprocesses 99\nprocs_running 3\nprocs_blocked 1\n"})
    assert environment.read_runnable(tmp_path) == 3


def test_cpu_times_of_an_old_kernel_without_steal(tmp_path: Path) -> None:
    write(tmp_path, {"proc/stat": "cpu  10 1 20 300\n"})
    assert environment.read_cpu_times(tmp_path) == environment.CpuTimes(total=331, work=31, stolen=0)


def test_memory(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/status": "Name:\tx\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n"})
    assert environment.read_memory(tmp_path) == (1024 * 1024, 2048 * 1024)
    write(tmp_path, {"proc/self/status": "Name:\tx\n"})
    assert environment.read_memory(tmp_path) == (None, None)


def test_memory_of_this_process_is_plausible() -> None:
    _, peak = environment.read_memory()
    assert peak is None or 1 << 20 < peak < 1 << 42


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 9454\nstepping\t: 1\n", "AMD EPYC 9454"),
        (
            "processor\t: 0\nBogoMIPS\t: 108.00\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n",
            "Raspberry Pi 5 Model B Rev 1.0",
        ),
    ],
)
def test_cpu_name(tmp_path: Path, cpuinfo: str, name: str) -> None:
    assert environment.cpu_name(write(tmp_path, {"proc/cpuinfo": cpuinfo})) == name


def test_cpu_name_is_never_empty_or_missing(tmp_path: Path) -> None:
    assert environment.cpu_name(tmp_path)


@pytest.mark.parametrize(("text", "cores"), [("0", (0,)), ("0,2,4-7", (0, 2, 4, 5, 6, 7)), ("3 , 1-2,2", (1, 2, 3))])
def test_core_lists(text: str, cores: tuple[int, ...]) -> None:
    assert environment.parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "-1", "4-2", "1,,2", "0x1", "1.5", "999999999"])
def test_refuses_texts_without_cores(text: str) -> None:
    with pytest.raises(UsageError, match="does not name cores"):
        environment.parse_cores(text)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin processes")
def test_pinning_ends_with_its_block() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    with environment.pinned((core,)):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before
    with environment.pinned(()):
        assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin processes")
def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="core 99998 is not available"), environment.pinned((99998, 99999)):
        pytest.fail("not reached")


def test_a_system_that_cannot_pin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(UsageError, match="Leave out --pin"), environment.pinned((0,)):
        pytest.fail("not reached")


def test_a_machine_is_described_in_plain_values(tmp_path: Path) -> None:
    machine = environment.describe_machine(tmp_path)
    assert list(machine) == ["cpu_name", "architecture", "os", "threads", "allowed_cores", "governors"]
