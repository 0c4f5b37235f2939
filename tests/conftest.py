"""Fixtures that every test shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Timings are never asserted: the machine that runs the tests may be busy with something else.
settings.register_profile("edgeq", deadline=None)
settings.load_profile("edgeq")

# As edgeq's programs do; see docs/architecture.md, Privacy.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

REPOSITORY = Path(__file__).resolve().parent.parent

# Nothing is put into the user's cache; what takes long to make is kept from run to run.
os.environ.setdefault("XDG_CACHE_HOME", str(REPOSITORY / ".pytest_cache" / "home"))


def find_shared_data() -> Path | None:
    """Real models and data lie beside the checkout (`shared/data`), never inside it; EDGEQ_SHARED_DATA overrides."""
    named = os.environ.get("EDGEQ_SHARED_DATA")
    candidates = [Path(named)] if named else [parent / "shared" / "data" for parent in REPOSITORY.parents]
    return next((c for c in candidates if c.is_dir()), None)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    found = find_shared_data()
    if found is None:
        pytest.skip("shared/data is not beside this checkout (or set EDGEQ_SHARED_DATA)")
    return found


@pytest.fixture(autouse=True, scope="session")
def _no_patience() -> None:
    """Waiting for undisturbed runs is in vain where other tests run beside: it only took seconds of every build."""
    from edgeq.pipeline import proof

    proof._PATIENCE_SECONDS = 0.0
