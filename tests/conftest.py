"""Fixtures that every test shares."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Timings are never asserted: the machine that runs the tests may be busy with something else.
settings.register_profile("edgeq", deadline=None)
settings.load_profile("edgeq")

# One process a core: threads that wait for each other in busy loops would take the other worker's time.
for library in ("OPENBLAS", "OMP", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# As edgeq's programs do; see docs/architecture.md, Privacy.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

REPOSITORY = Path(__file__).resolve().parent.parent

# Nothing is put into the user's cache; what takes long to make is kept from run to run.
os.environ.setdefault("XDG_CACHE_HOME", str(REPOSITORY / ".pytest_cache" / "home"))


def find_shared_data() -> Path | None:
    """Real models and data lie next to the checkout (`shared/data`), never inside it; EDGEQ_SHARED_DATA overrides."""
    named = os.environ.get("EDGEQ_SHARED_DATA")
    candidates = [Path(named)] if named else [parent / "shared" / "data" for parent in REPOSITORY.parents]
    return next((c for c in candidates if c.is_dir()), None)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    found = find_shared_data()
    if found is None:
        pytest.skip("shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first, so that no worker ends with it alone."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _nothing_tuned_before(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one test tunes is unknown to the next."""
    before = os.environ.get("XDG_STATE_HOME")
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.getbasetemp() / "state" / name)
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(autouse=True, scope="session")
def _brief_timings() -> None:
    """No test looks at how long something takes, and next to other tests no run is undisturbed: proofs are timed, but
    for a moment, and so is a warm-up that names no limits."""
    from edgeq_device.latency import WarmUp

    from edgeq.measure import bench as race

    race._TIMED_SECONDS = race._TIMED_SECONDS_IN_SEVERAL = 0.05
    race._PATIENCE_SECONDS = 0.0
    race._WARM_UP = WarmUp(window=3, min_s=0.0, max_s=0.05)
    WarmUp.__init__.__defaults__ = (10, 0.05, 0.0, 0.05, 100_000)


@pytest.fixture(scope="session")
def saturates_here() -> bool:
    """Whether this machine's own kernels add two products in 16 bits."""
    from edgeq.hardware.detect import detect_machine
    from edgeq.hardware.profile import load_profiles, match_profile

    return bool(match_profile(detect_machine(), load_profiles()).profile.hazards.get("saturates_int16"))


@pytest.fixture
def exact_kernels(saturates_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a model computes, not of what this machine makes of it: its sums of products are exact, also
    where its own kernels saturate. Where onnxruntime refuses the option, a model runs without it (S8S8 QOperator models
    are exact anyway)."""
    if not saturates_here:
        return
    import onnxruntime

    from edgeq.model.saturation import exact_options

    class Exact(onnxruntime.InferenceSession):
        def __init__(self, model: object, sess_options: object = None, *rest: object, **more: object) -> None:
            options: Any = sess_options or onnxruntime.SessionOptions()
            ((key, value),) = exact_options().items()
            options.add_session_config_entry(key, value)
            try:
                super().__init__(model, options, *rest, **more)
            except Exception:  # of onnxruntime, whose exceptions share no base class below it
                options.add_session_config_entry(key, "0")
                super().__init__(model, options, *rest, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Exact)


@pytest.fixture
def only_exact_kernels(saturates_here: bool) -> None:
    """For what `exact_kernels` does not reach: graphs that run as they are written, and layers that share a weight."""
    if saturates_here:
        pytest.skip("this CPU adds two products in 16 bits, and onnxruntime has no exact kernels for such a graph")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    from tests.one_thread import one_thread

    one_thread()


@pytest.fixture
def made_up_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of a bench that look at something else: each model's memory takes a process of its own."""
    from edgeq_device.memory import MemoryUse

    for place in ("edgeq.measure.latency", "edgeq_device.bench_models"):
        monkeypatch.setattr(f"{place}.measure_memory", lambda request, shapes: MemoryUse(1, 2, 3))


@pytest.fixture(scope="session")
def masked() -> None:
    """The runtime for lesser CPUs, where it can be made: once for all workers, as it takes a quarter of a minute."""
    from edgeq.emulate import routes
    from edgeq.emulate.emulator import home

    if not routes.why_not():
        import fcntl

        home().mkdir(parents=True, exist_ok=True)
        with (home() / "masked.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            routes.masked_command(())
