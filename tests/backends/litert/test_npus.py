"""Test what edgeq says about NPUs whose compilers take .tflite files, and the files that it writes for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgeq
from edgeq.backends.base import backend_for
from edgeq.backends.litert.dialect import dialect
from edgeq.backends.litert.network import Scales, TfliteOperator, TfliteTensor
from edgeq.backends.litert.npus import CASES, OPTION, NpuCompiler, NpuLimit, find_compiler, npu_compilers
from edgeq.errors import HardwareError, UsageError
from edgeq.hardware.target import Target, load_targets, resolve
from tests.backends.litert.files import litert
from tests.backends.litert.test_wide import build

TARGETS = {name: target for name, target in load_targets().items() if OPTION in target.device.get("engine_options", {})}


def test_every_compiler_belongs_to_a_target_and_every_limit_is_known() -> None:
    compilers = {compiler.name: compiler for target in TARGETS.values() if (compiler := find_compiler(target.device))}
    assert compilers == npu_compilers()
    limits = [limit for compiler in compilers.values() for limit in compiler.limit]
    assert {limit.case for limit in limits} == set(CASES)
    kinds = {kind for limit in limits for kind in limit.kinds} | {k for c in compilers.values() for k in c.listed}
    assert kinds <= set(dialect())


def test_an_unknown_compiler_brings_the_nearest() -> None:
    with pytest.raises(HardwareError, match=r"unknown npu 'neutrn' in \[device\] engine_options.*neutron"):
        find_compiler({"engine_options": {OPTION: "neutrn"}})


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_an_npu_runs_layers_in_integers_alone_and_was_never_run(target: Target) -> None:
    assert target.profile.integer_only
    assert "compilers" in target.profile.never_run
    assert target.profile.scheme.per_channel == (target.profile.name == "litert-npu")


def _tensor(name: str, shape: tuple[int, ...], values: np.ndarray | None = None, scales: int = 1) -> TfliteTensor:
    scale = Scales(np.full(scales, 0.1, np.float32), np.zeros(scales, np.int64))
    return TfliteTensor(name, shape, "int8" if values is None else "int32", scale, values)


def _numbers(*numbers: int) -> TfliteTensor:
    return _tensor("numbers", (len(numbers),), np.array(numbers, np.int32))


IMAGE = _tensor("x", (1, 8, 8, 4))
BROKEN = {
    "per-channel": ("CONV_2D", (IMAGE, _tensor("w", (4, 1, 1, 4), np.ones((4, 1, 1, 4)), 4)), (1, 8, 8, 4)),
    "skips-elements": (
        "STRIDED_SLICE",
        (IMAGE, _numbers(0, 0, 0, 0), _numbers(1, 8, 8, 4), _numbers(1, 2, 2, 1)),
        (1, 4, 4, 4),
    ),
    "reduces-other-axes": ("MEAN", (IMAGE, _numbers(3)), (1, 8, 8, 1)),
    "more-elements": ("SOFTMAX", (IMAGE,), (1, 200, 100)),
    "more-than-3-axes": ("RESHAPE", (IMAGE, _numbers(2, 2, 8, 8)), (2, 2, 8, 8)),
    "other-resize-factors": ("RESIZE_NEAREST_NEIGHBOR", (IMAGE, _numbers(24, 24)), (1, 24, 24, 4)),
}
FINE = {
    "per-channel": ("CONV_2D", (IMAGE, _tensor("w", (4, 1, 1, 4), np.ones((4, 1, 1, 4)))), (1, 8, 8, 4)),
    "skips-elements": (
        "STRIDED_SLICE",
        (IMAGE, _numbers(0, 0, 0, 0), _numbers(1, 4, 4, 4), _numbers(1, 1, 1, 1)),
        (1, 4, 4, 4),
    ),
    "reduces-other-axes": ("MEAN", (IMAGE, _numbers(1, 2)), (1, 4)),
    "more-elements": ("SOFTMAX", (IMAGE,), (1, 8, 8, 4)),
    "more-than-3-axes": ("RESHAPE", (IMAGE, _numbers(1, 4, 8, 8)), (1, 4, 8, 8)),
    "other-resize-factors": ("RESIZE_NEAREST_NEIGHBOR", (IMAGE, _numbers(16, 32)), (1, 16, 32, 4)),
}


def test_every_case_has_an_example() -> None:
    assert set(BROKEN) == set(FINE) == set(CASES)


def _operator(kind: str, inputs: tuple[TfliteTensor, ...], shape: tuple[int, ...]) -> TfliteOperator:
    return TfliteOperator(kind, inputs, (_tensor("y", shape),), node="n")


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_limit_applies_only_beyond_it(case: str) -> None:
    compiler = NpuCompiler(
        "c", "the compiler", "a page", limit=(NpuLimit(case, "cpu", "a reason", "a page", most=16000),)
    )
    (sentence, _) = compiler.notes([_operator(*BROKEN[case])])
    assert sentence.endswith("of 'n' stays on the CPU in the compiler: a reason (a page)")
    assert len(compiler.notes([_operator(*FINE[case])])) == 1


def test_an_operator_that_the_maker_does_not_list_cuts_the_model() -> None:
    compiler = npu_compilers()["coral-edge-tpu"]
    notes = compiler.notes([_operator("HARD_SWISH", (IMAGE,), (1, 8, 8, 4))])
    assert "HARD_SWISH of 'n' stays on the CPU" in notes[0]
    assert "every operator behind the first of these" in notes[1]


@litert
@pytest.mark.parametrize("name", ["stm32mp25", "coral-edge-tpu", "imx95"])
def test_a_file_for_an_npu_is_all_integers(tmp_path: Path, name: str) -> None:
    nodes = "r = Conv<pads=[1,1,1,1], group=4>(h, d, c)\n p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)\n"
    built = build(tmp_path, f"{nodes} f = Flatten(p)\n y = Gemm<transB=1>(f, g64, c)", "1,4", name)
    assert {operator.type for operator in built.network.operators} <= {"int8", None}
    weights = [o.inputs[1] for o in built.network.operators if o.kind in ("CONV_2D", "DEPTHWISE_CONV_2D")]
    several = name == "imx95"
    assert all(w is not None and w.scales is not None and (w.scales.scale.size > 1) == several for w in weights)
    assert not any("stays on" in note for note in built.artifact.notes)


@litert
def test_a_scheme_that_the_compiler_rejects_is_refused_before_any_work() -> None:
    target = resolve("genio-700")
    scheme = target.profile.scheme
    backend_for(target).check(scheme)
    with pytest.raises(UsageError, match=r"NeuroPilot takes no weights with a scale for each channel.*LiteRT 7603"):
        backend_for(target).check(scheme.replace(per_channel=True))
    with pytest.raises(UsageError, match="no kernels for 16-bit activations"):
        backend_for(target).check(scheme.replace(wide=("*",)))


@litert
def test_inspect_names_what_stays_on_the_cpu(tmp_path: Path) -> None:
    modes = 'mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"'
    build(tmp_path, f"[grow] y = Resize<{modes}>(h, , threefold)", "1,4,24,24")
    report = edgeq.inspect(tmp_path / "net.onnx", ["imx95", "stm32mp25"])
    (note,) = (note for note in report.notes if "'grow'" in note)
    assert note.startswith("imx95: RESIZE_NEAREST_NEIGHBOR of 'grow' stays on the CPU in NXP's Neutron converter")
