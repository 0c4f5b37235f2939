"""The real thing. Skipped, saying so, where there is no NVIDIA GPU: nothing in here has been run without one."""

from __future__ import annotations

import pytest
from edgeq_device.gpu import read_gpus

from edgeq.pipeline.doctor import doctor

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def _gpu() -> None:
    gpus, problem = read_gpus()
    if not gpus:
        pytest.skip(problem)


@pytest.mark.usefixtures("_gpu")
def test_every_variant_that_fits_agrees_with_the_simulation() -> None:
    found = doctor(gpu=True)
    runs = [check for check in found.checks if check.name.startswith("run ")]
    assert any(check.status == "ok" and "nvidia" in check.name for check in runs), found
    found.check(gpu=False)
