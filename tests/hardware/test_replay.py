"""Test that each recorded machine gets its correct profile, for the printed reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.util.folders import shipped
from edgeq.util.records import plain
from tests.hardware.recorded import FOLDER, RECORDS, machine_of

PROFILES = load_profiles([shipped("profiles")])


@pytest.mark.parametrize("record", [pytest.param(record, id=name) for name, record in RECORDS.items()])
def test_recorded_machine(record: dict[str, Any]) -> None:
    machine = machine_of(record)
    match = match_profile(machine, PROFILES)
    explained = [line for line in match.explain() if not line.endswith("lacks an NVIDIA GPU")]
    assert match.profile.name == record["profile"]
    assert explained == record["explain"]
    assert list(machine.notes) == record.get("notes", [])


def test_there_are_enough_and_every_file_is_used() -> None:
    assert len(RECORDS) >= 25
    named = {record[key] for record in RECORDS.values() for key in ("cpuinfo", "sysctl", "py_cpuinfo") if key in record}
    assert named == {path.name for path in FOLDER.iterdir()} - {"machines.toml"}


def test_every_profile_but_the_named_accelerators_is_some_machine() -> None:
    named = {"systolic-int8", "qualcomm-htp", "litert-xnnpack", "litert-micro", "ncnn-arm", "rockchip-npu", "wasm"}
    named |= {"litert-npu", "litert-npu-per-tensor", "neural-art"}
    named |= {"espdl-c", "espdl-s3", "espdl-p4"}
    assert set(PROFILES) - {record["profile"] for record in RECORDS.values()} == named


@pytest.mark.parametrize(
    ("name", "cpu", "vendor", "cores", "threads"),
    [
        ("haswell", "Intel(R) Core(TM) i7-4770 CPU @ 3.40GHz", "GenuineIntel", 2, 4),
        ("alder-lake", "12th Gen Intel(R) Core(TM) i7-1260P", "GenuineIntel", 2, 4),
        ("cortex-a76", "Cortex-A76", "ARM", 0, 4),
        ("apple-m4", "Apple M4 Pro", "", 12, 12),
        ("windows-tiger-lake", "11th Gen Intel(R) Core(TM) i7-1185G7 @ 3.00GHz", "GenuineIntel", 0, 8),
    ],
)
def test_identity(name: str, cpu: str, vendor: str, cores: int, threads: int) -> None:
    machine = machine_of(RECORDS[name])
    assert (machine.cpu_name, machine.vendor, machine.cores, machine.threads) == (cpu, vendor, cores, threads)


def test_a_feature_that_linux_cannot_list_comes_from_cpuid() -> None:
    assert "avx_vnni_int8" in machine_of(RECORDS["sierra-forest"]).features
    assert "avx_vnni_int8" not in machine_of(RECORDS["alder-lake"]).features


def test_caches_and_memory_come_from_sysctl_and_py_cpuinfo() -> None:
    mac, windows = machine_of(RECORDS["apple-m1"]), machine_of(RECORDS["windows-tiger-lake"])
    assert mac.memory_bytes == 16 << 30
    assert [(cache.level, cache.kind, cache.size) for cache in mac.caches] == [
        (1, "data", 64 << 10),
        (1, "instruction", 128 << 10),
        (2, "unified", 4 << 20),
    ]
    assert [(cache.level, cache.size) for cache in windows.caches] == [(2, 5 << 20), (3, 12 << 20)]


def test_a_machine_is_plain_json() -> None:
    record = plain(machine_of(RECORDS["gpu-t4"]))
    assert json.loads(json.dumps(record)) == record
    assert record["gpus"][0]["compute_capability"] == "7.5"
    assert record["features"] == sorted(record["features"])
