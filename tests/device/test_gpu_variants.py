"""Test the order TensorRT, CUDA, CPU: which variant each device chooses, and what is reported of the other variants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.bundle import opening
from edgeq_device.bundle.opening import open_best
from edgeq_device.bundle.select import Device, judge, select
from edgeq_device.engines.cuda import Gpu
from edgeq_device.engines.sessions import open_session
from edgeq_device.errors import CheckFailedError, RuntimeUnavailableError

from .fakes import CPU, bundle, case, device, variant

TENSORRT, CUDA = "TensorrtExecutionProvider", "CUDAExecutionProvider"
T4_INFO = {"min_compute_capability": "7.5", "min_tensorrt": "10.0"}
A100_INFO = {"min_compute_capability": "8.0", "min_tensorrt": "10.0"}
TABLE_INFO = {"min_compute_capability": "7.5", "min_tensorrt": "8.0", "below_tensorrt": "11.0"}
FOR_T4 = variant("t4", ep=TENSORRT, rank=110, info=T4_INFO)
FOR_A100 = variant("a100", ep=TENSORRT, rank=120, info=A100_INFO)
ON_CUDA = variant("cuda", ep=CUDA, architecture="any", rank=100, info={"min_compute_capability": "5.3"})
ON_CPU = variant("cpu", architecture="any", rank=0)
ALL = bundle(FOR_T4, FOR_A100, ON_CUDA, ON_CPU)
GPUS = {"t4": Gpu("Tesla T4", (7, 5)), "a100": Gpu("NVIDIA A100", (8, 0)), "h200": Gpu("NVIDIA H200", (9, 0))}


def gpu_device(*names: str, tensorrt: str = "10.13.0", **changes: Any) -> Device:
    plain = device(providers=(TENSORRT, CUDA, CPU))
    found = tuple(GPUS[name] for name in names)
    return replace(plain, gpus=found, tensorrt=tensorrt, **changes)


@pytest.mark.parametrize(("gpu", "chosen"), [("t4", "t4"), ("a100", "a100"), ("h200", "a100")])
def test_compute_capability_decides(gpu: str, chosen: str) -> None:
    assert select(ALL, gpu_device(gpu)).variant.name == chosen


def test_the_best_of_several_gpus_counts() -> None:
    assert select(ALL, gpu_device("t4", "a100")).variant.name == "a100"


def test_cuda_where_tensorrt_is_missing_or_old() -> None:
    without = gpu_device("a100", tensorrt="", tensorrt_problem="TensorRT 10 is not installed")
    assert select(ALL, without).variant.name == "cuda"
    assert judge(FOR_A100, without).reasons == ("TensorRT 10 is not installed",)
    old = gpu_device("a100", tensorrt="8.6.1")
    assert judge(FOR_A100, old).reasons == ("it needs TensorRT 10.0, this device has 8.6.1",)


def test_the_cpu_where_there_is_no_gpu() -> None:
    bare = gpu_device(gpu_problem="this device has no NVIDIA driver")
    choice = select(ALL, bare)
    assert choice.variant.name == "cpu"
    assert all("this device has no NVIDIA driver" in verdict.reasons for verdict in choice.others)


def test_a_table_is_for_old_tensorrt_only() -> None:
    table = variant("table", ep=TENSORRT, rank=130, info=TABLE_INFO)
    assert judge(table, gpu_device("t4", tensorrt="8.6.1")).fits
    assert judge(table, gpu_device("t4", tensorrt="11.2.0")).reasons == (
        "it needs a TensorRT below 11.0, this device has 11.2.0",
    )


def open_but(*broken: str) -> Any:
    def opened(chosen: Any, threads: int) -> str:
        if chosen.name in broken:
            raise RuntimeUnavailableError(f"{chosen.name} does not start")
        return f"session of {chosen.name}"

    return opened


def test_a_provider_that_does_not_start_gives_way() -> None:
    opened = open_best(ALL, gpu_device("a100"), open_it=open_but("a100", "t4"))
    assert opened.session == "session of cuda"
    assert opened.passed_over == ("not a100: a100 does not start", "not t4: t4 does not start")


def test_a_named_variant_has_no_fallback() -> None:
    with pytest.raises(RuntimeUnavailableError, match="a100 does not start"):
        open_best(ALL, gpu_device("a100"), name="a100", open_it=open_but("a100"))


class _Doubles:
    """Imitate an engine that returns twice the input."""

    def run(self, names: Any, feeds: Any) -> Any:
        return [2 * feeds["x"]]


def test_an_engine_that_answers_wrongly_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TensorRT engine with wrong results is passed over. TensorRT 8.6.0 on an H200 ignored the scales of a depthwise
    convolution's weights.
    """
    monkeypatch.setattr(opening, "open_session", lambda variant, threads: _Doubles())
    wrong = replace(FOR_T4, cases=(case(tmp_path, [[1.0]], np.ones((1, 1), np.float32)),), tolerance={"y": 0.1})
    table = replace(wrong, info={**T4_INFO, "table": "ranges"})
    opened = open_best(bundle(wrong, ON_CUDA), gpu_device("t4"))
    assert opened.choice.variant is ON_CUDA
    assert opened.passed_over == ("not t4: TensorRT's engine gives wrong results here: output y: error 1 is over 0.1",)
    with pytest.raises(CheckFailedError, match="TensorRT's engine gives wrong results here"):
        open_best(bundle(wrong, ON_CUDA), gpu_device("t4"), name="t4")
    assert open_best(bundle(table, ON_CUDA), gpu_device("t4")).choice.variant is table
    right = replace(wrong, tolerance={"y": 1.5})
    assert open_best(bundle(right, ON_CUDA), gpu_device("t4")).choice.variant is right


def test_the_last_one_fails_for_good() -> None:
    with pytest.raises(RuntimeUnavailableError, match="cpu does not start"):
        open_best(ALL, gpu_device("a100"), open_it=open_but("a100", "t4", "cuda", "cpu"))


def test_a_listed_provider_that_onnxruntime_cannot_start_is_an_error(models: dict[str, Path], tmp_path: Path) -> None:
    """edgeq raises an error. ONNX Runtime itself continues on the CPU, with only a warning."""
    on_cuda = variant("cuda", ep=CUDA, model=models["narrow"], cases=(case(tmp_path, [[1.0]], [[2.0]]),))
    import onnxruntime

    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.warns(UserWarning, match=CUDA), pytest.raises(RuntimeUnavailableError, match="cannot start it"):
        open_session(on_cuda)
