"""Verify each CPU rule by running it on the installed onnxruntime."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from edgeq.model.int8_rules import DEFAULT, int8_rules

from .qdq import PROBES, Probe, build, runs_in_int8

RULES = int8_rules("cpu")
CONTROL_FLOW = {"If", "Loop", "Scan"}
RESIZE: dict[str, Any] = {"extras": PROBES["Resize"].extras, "same_scale": True}
NARROW = {"kernel_shape": [2, 2]}


def optimized(probe: Probe, folder: Path, *, activation: str, **how: Any) -> onnx.ModelProto:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    proto = build(probe, activation=activation, **how)
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimized.onnx")


def test_every_rule_has_a_probe() -> None:
    assert set(RULES) - {DEFAULT} - CONTROL_FLOW - {"RMSNormalization"} <= set(PROBES)


@pytest.mark.parametrize("activation", ["uint8", "int8"])
@pytest.mark.parametrize("op_type", sorted(PROBES))
def test_rule_by_execution(tmp_path: Path, op_type: str, activation: str) -> None:
    # After a Relu, calibration finds a zero point at the lower end.
    zero = 0 if op_type in ("Relu", "Clip") else 128
    result = optimized(PROBES[op_type], tmp_path, activation=activation, zero=zero)
    assert runs_in_int8(result) is RULES.get(op_type, RULES[DEFAULT]).int8


@pytest.mark.parametrize("op_type", sorted(op_type for op_type, rule in RULES.items() if rule.float_result))
def test_float_results_by_execution(tmp_path: Path, op_type: str) -> None:
    result = optimized(PROBES[op_type], tmp_path, activation="uint8", float_result=True)
    ran = [node.op_type for node in result.graph.node]
    assert ran in (["QuantizeLinear", "QGemm"], ["QuantizeLinear", "MatMulIntegerToFloat"])


@pytest.mark.parametrize(
    ("probe", "zero", "in_int8"),
    [
        (Probe("Gemm", ((4, 8),), weights=((8, 6),), bias=6, attributes={"alpha": 0.5}), 128, False),
        (Probe("Gemm", ((4, 8),), weights=((8, 6),), bias=6, attributes={"beta": 0.5}), 128, False),
        (Probe("Gemm", ((4, 8),), weights=((8, 6),), attributes={"beta": 0.5}), 128, True),
        (Probe("Gemm", ((8, 4),), weights=((8, 6),), attributes={"transA": 1}), 128, True),
        (Probe("Resize", attributes={"mode": "linear"}, **RESIZE), 128, False),
        (Probe("Resize", attributes={"mode": "cubic"}, **RESIZE), 128, False),
        (Probe("Relu", same_scale=True), 128, False),
        (Probe("MatMul", ((2, 4, 8), (2, 8, 6))), 128, True),
        (Probe("Conv", ((1, 4, 8, 8), (6, 4, 3, 3))), 128, True),
        (Probe("MaxPool", attributes=NARROW), 128, False),
        (Probe("Reshape", extras=(np.array([1, -1]),)), 128, False),
    ],
    ids=lambda v: f"{v.op_type} {sorted(v.attributes)}" if isinstance(v, Probe) else "",
)
def test_conditions_by_execution(tmp_path: Path, probe: Probe, zero: int, in_int8: bool) -> None:
    assert runs_in_int8(optimized(probe, tmp_path, activation="uint8", zero=zero)) is in_int8


def test_a_dilated_average_does_not_load_once_quantized(tmp_path: Path) -> None:
    probe = Probe("AveragePool", attributes={**NARROW, "dilations": [2, 2]})
    with pytest.raises(Exception, match="QLinearAveragePool"):
        optimized(probe, tmp_path, activation="uint8")


@pytest.mark.parametrize(("weight", "in_int8"), [("uint8", True), ("int8", False)])
def test_a_constant_operand_needs_the_activations_type(tmp_path: Path, weight: str, in_int8: bool) -> None:
    probe = dataclasses.replace(PROBES["Add"], inputs=((1, 4, 8, 8),), weights=((4, 1, 1),))
    assert runs_in_int8(optimized(probe, tmp_path, activation="uint8", weight=weight)) is in_int8
