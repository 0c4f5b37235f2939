"""A hostile registry gets no login to another host, little memory, and no more than the time that is stated."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from edgeq_device.connection import Limits
from edgeq_device.errors import DeviceError
from edgeq_device.oci import parse_reference, pull

from edgeq.errors import EdgeqError
from edgeq.oci.transfer import pull_bundle, push_bundle

from .hostile import SECRETS, Hostile, hostile
from .registry import in_process
from .scenarios import SCENARIOS, Scenario

FAST = Limits(answer_s=0.15, least_rate=50_000, total_s=2, file_s=0, total_rate=1e9)
MOST_BYTES = 300 << 20
SLACK_S = 20
"""For a busy machine, where no clock is at stake."""


@pytest.fixture(scope="module")
def stored(good: Path) -> tuple[dict[str, bytes], str]:
    """What a registry has after a push, and the digest of the manifest."""
    with in_process() as registry:
        digest = push_bundle(good, f"{registry.host}/models/net").digest
        return registry.blobs, digest


@pytest.fixture
def hosts(stored: tuple[dict[str, bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with hostile(tmp_path / "docker", stored[0]) as found:
        yield found


def memory() -> int:
    """The largest memory that this process ever had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def attempts(
    scenario: Scenario, hosts: Hostile, good: Path, digest: str, folder: Path
) -> Iterator[Callable[[], object]]:
    """The commands that meet a scenario, on the workstation and on the device."""
    limits: dict[str, Any] = {"limits": FAST} if scenario.slow else {}
    reference = f"{hosts.home.host}/models/net@{digest}"
    if scenario.push:
        yield lambda: push_bundle(good, f"{hosts.home.host}/models/net", **limits)
        return
    yield lambda: pull(parse_reference(reference), folder / "device", **limits)
    if not scenario.slow:
        yield lambda: pull_bundle(reference, folder / "out")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_hostile_registries(
    scenario: Scenario, hosts: Hostile, good: Path, stored: tuple[dict[str, bytes], str], tmp_path: Path
) -> None:
    if scenario.push:
        hosts.store.blobs.clear()
    hosts.home.script = lambda asked: scenario.home(hosts, asked)
    hosts.other.script = lambda asked: scenario.other(hosts, asked)
    for attempt in attempts(scenario, hosts, good, stored[1], tmp_path):
        before, started, failed = memory(), time.monotonic(), None
        try:
            attempt()
        except (DeviceError, EdgeqError) as error:
            failed = error
        assert hosts.leaked() == []
        assert time.monotonic() - started < (FAST.total_s if scenario.slow else 0) + SLACK_S
        assert memory() - before < MOST_BYTES
        assert (failed is None) == (not scenario.says), failed
        if failed is not None:
            assert failed.exit_code in (7, 8)
            assert re.search(scenario.says, str(failed)), failed
            assert len(str(failed).splitlines()) == 1
            assert len(str(failed)) < 600
            assert not any(secret in str(failed) for secret in SECRETS)
    left = {path.name for path in tmp_path.iterdir()} - {"docker"}
    assert left == (set() if scenario.says or scenario.push else {"out", "device"})


def test_there_are_enough() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS) >= 60
