from __future__ import annotations

from pathlib import Path

import pytest

import edgeq
from edgeq import demo

from .runtime import need_runtime, with_runtime


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a bundle of the demo model has for a web server, with the runtime beside it."""
    need_runtime()
    bundle = tmp_path_factory.mktemp("web") / "bundle"
    edgeq.package(demo.MODEL, demo.CALIBRATION, bundle, targets="web-wasm", timed=False)
    return with_runtime(bundle / "files" / "web-wasm")
