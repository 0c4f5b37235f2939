"""A hostile registry cannot send a login to another host, use much memory, or take more than the stated time."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from edgeq_device.bundle.pull import pull
from edgeq_device.errors import DeviceError, RuntimeUnavailableError
from edgeq_device.trust.connection import LIMITS, Limits, ServerRequest
from edgeq_device.trust.registry import MAX_REDIRECTS, OciRepository, parse_reference

from edgeq.bundle.transfer import pull_bundle, push_bundle
from edgeq.errors import EdgeqError

from .hostile import LOGIN, SECRETS, Asked, Hostile, Reply, hostile, response
from .scenarios import SCENARIOS, SLOW, Scenario, guarded

FAST = Limits(answer_s=0.15, least_rate=50_000, total_s=2, file_s=0, total_rate=1e9)
MOST_BYTES = 300 << 20
SLACK_S = 20
"""For a busy machine, where no clock is at stake."""


@pytest.fixture
def hosts(stored: tuple[dict[str, bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with hostile(tmp_path / "docker", stored[0]) as found:
        yield found


def memory() -> int:
    """Return this process's peak memory in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def attempts(
    scenario: Scenario, hosts: Hostile, good: Path, digest: str, folder: Path
) -> Iterator[Callable[[], object]]:
    """Yield the commands that run into a scenario, on the workstation and on the device."""
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


def test_a_proxy_is_not_used_for_this_machine(
    hosts: Hostile, stored: tuple[dict[str, bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to this machine bypasses the proxy, which could read the login in plain text."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://{hosts.other.host}")
    hosts.home.script = lambda asked: guarded(asked, "Basic realm=x")
    pull(parse_reference(f"{hosts.home.host}/models/net@{stored[1]}"), tmp_path / "out")
    assert any(LOGIN in asked.head for asked in hosts.home.seen)
    assert hosts.other.seen == []


@pytest.mark.parametrize("reads", [False, True])
def test_an_upload_that_is_not_read(reads: bool, hosts: Hostile) -> None:
    """An upload ends in time if the registry never answers, or if it reads none of an upload beyond the system's
    buffers.
    """

    def slowly(asked: Asked) -> Reply:
        if asked.method != "PUT" or reads:
            asked.body()
        return hosts.home.silence()

    hosts.home.script = slowly
    registry = OciRepository(parse_reference(f"{hosts.home.host}/models/net"), FAST)
    started = time.monotonic()
    with pytest.raises(RuntimeUnavailableError, match="no answer within" if reads else SLOW):
        registry.send(ServerRequest("PUT", body=b"\0" * (1 << 16 if reads else 1 << 26)), "blobs/uploads/1")
    assert time.monotonic() - started < FAST.total_s + SLACK_S


def test_the_first_failure_ends_the_others(
    hosts: Hostile, stored: tuple[dict[str, bytes], str], tmp_path: Path
) -> None:
    """A wrong blob ends the pull while the other blobs are still slow but within the limits."""

    def script(asked: Asked) -> Reply:
        if "/blobs/" not in asked.path:
            return None
        first = next(one for one in list(hosts.home.seen) if "/blobs/" in one.path)
        return response(200, b"x") if asked is first else hosts.home.silence()

    hosts.home.script = script
    started = time.monotonic()
    with pytest.raises(DeviceError, match="the manifest states"):
        pull(parse_reference(f"{hosts.home.host}/models/net@{stored[1]}"), tmp_path / "out")
    assert time.monotonic() - started < SLACK_S


def test_slow_but_honest(hosts: Hostile, stored: tuple[dict[str, bytes], str], tmp_path: Path) -> None:
    """A download at the least rate is accepted, however long it takes."""

    def script(asked: Asked) -> Reply:
        content = hosts.store.blobs.get(asked.path.rpartition("/")[2], b"")
        if "/manifests/" not in asked.path:
            return None
        parts = [content[start : start + 400] for start in range(0, len(content), 400)]
        return hosts.home.drip([response(length=len(content)), *parts], 0.02)

    hosts.home.script = script
    patient = Limits(answer_s=5, least_rate=100, total_s=SLACK_S)
    pull(parse_reference(f"{hosts.home.host}/models/net@{stored[1]}"), tmp_path / "out", limits=patient)


def test_the_limits_are_the_documented_ones() -> None:
    page = Path(__file__).parents[3] / "docs" / "security.md"
    stated = (
        f"within {LIMITS.answer_s} s",
        f"{LIMITS.least_rate:,} bytes a second",
        f"{LIMITS.total_s} s in all",
        f"each file adds {LIMITS.file_s} s",
        f"{LIMITS.total_rate:,} bytes",
        f"{MAX_REDIRECTS} redirects",
    )
    text = " ".join(page.read_text().split())
    assert [words for words in stated if words not in text] == []


def test_there_are_enough() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS) >= 60
