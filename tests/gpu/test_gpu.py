"""Run edgeq on a real NVIDIA GPU, or skip the tests if there is none.

These tests ran on an H100 and an H200, never with TensorRT.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from edgeq_device.engines.catalog import engine_options
from edgeq_device.engines.cuda import CUDA, open_cuda
from edgeq_device.system.gpus import read_gpus

from edgeq import demo
from edgeq.jobs.doctor import check_engine, doctor
from edgeq.run.engines import load_engines

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def _gpu() -> None:
    gpus, problem = read_gpus()
    if not gpus:
        pytest.skip(problem)


@pytest.mark.usefixtures("_gpu")
def test_every_variant_that_fits_agrees_with_the_simulation() -> None:
    found = doctor(gpu=True)
    ran = {check.name: check.status for check in found.checks if check.name.startswith("run ")}
    assert "failed" not in ran.values(), found
    assert "ok" in (ran["run cuda-float16"], *(status for name, status in ran.items() if "nvidia" in name)), found


@pytest.mark.usefixtures("_gpu")
@pytest.mark.skipif(CUDA not in onnxruntime.get_available_providers(), reason="this onnxruntime has no CUDA")
def test_the_cuda_engine_computes_float32() -> None:
    right, found = check_engine(load_engines()["cuda"], ("tf32",))
    assert right, found


@pytest.mark.usefixtures("_gpu")
@pytest.mark.skipif(CUDA not in onnxruntime.get_available_providers(), reason="this onnxruntime has no CUDA")
def test_batches_of_several_sizes_give_what_the_cpu_gives() -> None:
    samples = np.load(demo.CALIBRATION)["image"]
    right = onnxruntime.InferenceSession(str(demo.MODEL), providers=["CPUExecutionProvider"])

    def open_with(providers: list[Any]) -> Any:
        return onnxruntime.InferenceSession(str(demo.MODEL), providers=providers)

    session = open_cuda(onnxruntime, engine_options(load_engines()["cuda"]), open_with)
    for rows in (1, 4, 1, 7, 4):
        feed = {"image": samples[rows : 2 * rows]}
        for found, wanted in zip(session.run(None, feed), right.run(None, feed), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert session.notes == ()
