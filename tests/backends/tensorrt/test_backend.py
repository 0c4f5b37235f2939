from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq.backends.base import backend_for
from edgeq.errors import UsageError
from edgeq.hardware.target import resolve
from edgeq.run.session import open_session

from .nets import CHANNELS, Bench, bench, random, residual


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(tmp_path_factory.mktemp("backend"), residual())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mode": "dynamic"}, "no dynamic int8"),
        ({"format": "QOperator"}, "no QLinear"),
        ({"activation_type": "uint8"}, "signed"),
        ({"activation_symmetric": False}, "zero point"),
        ({"reduce_range": True}, "32 bits"),
        ({"op_types": ("Softmax",)}, "does not quantize Softmax"),
    ],
)
def test_schemes_that_tensorrt_cannot_run_are_refused(change: dict[str, object], problem: str) -> None:
    target = resolve("nvidia-t4")
    with pytest.raises(UsageError, match=problem):
        backend_for(target).check(target.profile.scheme.replace(**change))


def test_the_file_is_opset_19_and_valid(small: Bench) -> None:
    model = onnx.load(small.build().model)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == 19


def test_stand_ins_compute_what_the_float_model_does(small: Bench) -> None:
    built = small.build()
    x = {"x": random(1, CHANNELS, 8, 8, seed=3)}
    exact = open_session(small.prepared.path).run(None, x)[0]
    assert [(a.name, a.artifact.provider) for a in built.alternatives] == [
        ("cuda-float16", "CUDAExecutionProvider"),
        ("cpu-float32", "CPUExecutionProvider"),
    ]
    for stand_in in built.alternatives:
        artifact = stand_in.artifact
        got = open_session(artifact.proof_model, artifact.proof_settings()).run(None, x)[0]
        np.testing.assert_allclose(got, exact, rtol=0.01, atol=0.01)


def test_the_same_input_gives_the_same_bytes(small: Bench) -> None:
    one_build, second = small.build(), small.build()
    assert Path(one_build.model).read_bytes() == Path(second.model).read_bytes()
    assert one_build.simulation is not None
    assert second.simulation is not None
    assert one_build.simulation.read_bytes() == second.simulation.read_bytes()


def test_only_some_operators(small: Bench) -> None:
    built = small.build(op_types=("Gemm",))
    kinds = {n["name"]: n["precision"] for n in built.details["placement"]["nodes"]}
    assert kinds["fc"] == "int8"
    assert kinds["one"] == "fp16"
