"""Make one small real bundle for all tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq import demo
from edgeq.data.open_source import Data
from edgeq.jobs.package import package
from edgeq.measure.task import make_task


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Package the demo model with its float model for this machine. Tests must not change this bundle."""
    place = tmp_path_factory.mktemp("report") / "digits"
    package(
        demo.MODEL,
        Data(demo.CALIBRATION, count=16),
        place,
        val=Data(demo.VALIDATION, count=32),
        task=make_task("classification"),
        with_float=True,
        timed=False,
    )
    return place
