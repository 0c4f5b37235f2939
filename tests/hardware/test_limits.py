from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgeq.hardware import detect
from edgeq.hardware.detect import Cache


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.usefixtures("eight_cpus")
def test_threads_by_affinity_alone(tmp_path: Path) -> None:
    assert detect.count_threads(tmp_path) == 8


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("quota", "threads"), [("150000 100000", 2), ("max 100000", 8), ("900000 100000", 8), ("5000 100000", 1)]
)
def test_threads_by_quota_of_version_2(tmp_path: Path, quota: str, threads: int) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": quota + "\n"})
    assert detect.count_threads(tmp_path) == threads


@pytest.mark.usefixtures("eight_cpus")
def test_the_tightest_ancestor_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        },
    )
    assert detect.count_threads(tmp_path) == 3


@pytest.mark.usefixtures("eight_cpus")
def test_version_1_with_the_path_of_the_host(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
            "proc/meminfo": "MemTotal:       16000000 kB\nMemFree: 1 kB\n",
        },
    )
    assert detect.count_threads(tmp_path) == 2
    assert detect.read_memory(tmp_path) == 1 << 30


def test_no_limit_is_not_a_limit(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "3:memory:/\n0::/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/x/memory.max": "max\n",
            "proc/meminfo": "MemTotal:       2048 kB\n",
        },
    )
    assert detect.read_memory(tmp_path) == 2048 * 1024


def test_nothing_known(tmp_path: Path) -> None:
    assert detect.read_memory(tmp_path) == 0
    assert detect.read_caches(tmp_path) == ()
    assert detect.read_board(tmp_path) == ""
    assert detect.count_cores("") == (0, 0)


def test_caches_and_board(tmp_path: Path) -> None:
    base = "sys/devices/system/cpu/cpu0/cache"
    write(
        tmp_path,
        {
            f"{base}/index0/level": "1\n",
            f"{base}/index0/type": "Data\n",
            f"{base}/index0/size": "64K\n",
            f"{base}/index1/level": "3\n",
            f"{base}/index1/type": "Unified\n",
            f"{base}/index1/size": "2M\n",
            f"{base}/index2/level": "4\n",
            "proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
        },
    )
    assert detect.read_caches(tmp_path) == (Cache(1, "data", 64 << 10), Cache(3, "unified", 2 << 20))
    assert detect.read_board(tmp_path) == "Raspberry Pi 5 Model B Rev 1.0"


def test_two_sockets_with_two_threads_a_core() -> None:
    blocks = [
        f"processor\t: {n}\nphysical id\t: {socket}\ncore id\t\t: {core}\n"
        for n, (socket, core) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)] * 2)
    ]
    assert detect.count_cores("\n".join(blocks)) == (4, 8)
