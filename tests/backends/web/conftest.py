from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import edgeq
from edgeq import demo

from .runtime import need_runtime, with_runtime


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Package the demo model for a web server, with the runtime next to it. All test workers share the folder."""
    need_runtime()
    import fcntl

    base = tmp_path_factory.getbasetemp()
    folder = base if worker_id == "master" else base.parent
    bundle = folder / "web-bundle"
    with (folder / "web.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not bundle.exists():
            targets = ("web-wasm", "this-machine")
            edgeq.package(demo.MODEL, demo.CALIBRATION, bundle, targets=targets, with_float=True, timed=False)
            with_runtime(shutil.copytree(bundle / "files" / "web-wasm", folder / "web-site"))
    return folder / "web-site"
