"""Define the fixtures that all tests share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Tests never assert timings, because the machine may be busy with something else.
settings.register_profile("edgeq", deadline=None)
settings.load_profile("edgeq")

# Each worker uses one core. Threads that wait in busy loops would take time from the other worker.
for library in ("OPENBLAS", "OMP", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# edgeq's programs set this too; see docs/architecture.md, Privacy.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

REPOSITORY = Path(__file__).resolve().parent.parent

# Tests write nothing to the user's cache. Files that take long to make are kept from run to run.
os.environ.setdefault("XDG_CACHE_HOME", str(REPOSITORY / ".pytest_cache" / "home"))


def find_shared_data() -> Path | None:
    """Return the folder of real models and data: `EDGEQ_SHARED_DATA`, or `shared/data` next to the checkout."""
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
    """Put slow tests first, so that no worker runs one alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _nothing_tuned_before(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the results of earlier tuning runs from each test."""
    before = os.environ.get("XDG_STATE_HOME")
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.getbasetemp() / "state" / name)
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(autouse=True, scope="session")
def _options_in_outputs() -> None:
    """Fail a test whose command prints a mark of `edgeq.arguments` instead of an option."""
    from click.testing import CliRunner, Result

    invoke = CliRunner.invoke

    def checked(*arguments: Any, **named: Any) -> Result:
        result = invoke(*arguments, **named)
        assert "⟨" not in result.output
        return result

    CliRunner.invoke = checked  # type: ignore[method-assign]


@pytest.fixture(autouse=True, scope="session")
def _brief_timings() -> None:
    """Shorten timed runs and default warm-ups to a moment.

    No test checks a latency, and a test that runs next to others is never undisturbed.
    """
    from edgeq_device.measure.latency import WarmUp

    from edgeq.measure import race, timed_model

    race._TIMED_SECONDS = race._TIMED_SECONDS_IN_SEVERAL = 0.05
    race._PATIENCE_SECONDS = 0.0
    timed_model.SESSIONS = 1  # a process for each session takes longer than most tests
    race._WARM_UP = WarmUp(window=3, min_s=0.0, max_s=0.05)
    WarmUp.__init__.__defaults__ = (10, 0.05, 0.0, 0.05, 100_000)


@pytest.fixture(scope="session")
def saturates_here() -> bool:
    """Return whether this machine's own kernels add two products in 16 bits."""
    from edgeq.hardware.detect import detect_machine
    from edgeq.hardware.profile import load_profiles, match_profile

    return bool(match_profile(detect_machine(), load_profiles()).profile.hazards.get("saturates_int16"))


@pytest.fixture
def exact_kernels(saturates_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sums of products exact, even if this machine's kernels saturate.

    Use it in tests of what a model computes. If onnxruntime refuses the option, the model runs without it (S8S8
    QOperator models are exact anyway).
    """
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
            except Exception:  # onnxruntime's exceptions share no narrower base class
                options.add_session_config_entry(key, "0")
                super().__init__(model, options, *rest, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Exact)


@pytest.fixture
def only_exact_kernels(saturates_here: bool) -> None:
    """Skip the test on a CPU that saturates, for models that `exact_kernels` cannot make exact.

    These are graphs that run without optimisation, and layers that share a weight.
    """
    if saturates_here:
        pytest.skip("this CPU adds two products in 16 bits, and onnxruntime has no exact kernels for such a graph")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    from tests.one_thread import one_thread

    one_thread()


@pytest.fixture
def made_up_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of memory with made-up figures, because each real one starts a process."""
    from edgeq_device.engines.memory import MemoryUse

    for place in ("edgeq.measure.timed_model", "edgeq_device.bundle.bench_models"):
        monkeypatch.setattr(f"{place}.measure_memory", lambda request, shapes: MemoryUse(1, 2, 3))


@pytest.fixture(scope="session")
def masked() -> None:
    """Make the masked runtime if this machine can. All workers share it, because it takes 15 seconds to make."""
    from edgeq.emulate import routes
    from edgeq.emulate.cache import home

    if not routes.mask_problem():
        import fcntl

        home().mkdir(parents=True, exist_ok=True)
        with (home() / "masked.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            routes.build_masked_command(())
