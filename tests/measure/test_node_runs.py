"""Map the kernels of a profile to the source nodes that they stand for."""

from __future__ import annotations

from typing import Any

import pytest

from edgeq.measure.kernels import read_kernel_runs
from edgeq.measure.node_runs import classify, map_kernel_names
from edgeq.model.convert import from_proto
from edgeq.model.macs import node_macs
from tests.measure.test_coverage import float_source

Shaped = tuple[str, list[int]]


def event(name: str, op_type: str, inputs: list[Shaped], output: Shaped) -> dict[str, Any]:
    arguments = {
        "op_name": op_type,
        "input_type_shape": [{dtype: shape} for dtype, shape in inputs],
        "output_type_shape": [{output[0]: output[1]}],
    }
    return {"cat": "Node", "name": f"{name}_kernel_time", "dur": 1, "args": arguments}


IMAGE = ("uint8", [1, 8, 8, 16])
FLOAT_IMAGE = ("float", [1, 16, 8, 8])


@pytest.mark.parametrize(
    ("op_type", "first", "kind"),
    [
        ("QLinearConv", IMAGE, "int8"),
        ("Slice", IMAGE, "int8"),
        ("Conv", FLOAT_IMAGE, "float"),
        ("Softmax", FLOAT_IMAGE, "float"),
        ("QuantizeLinear", FLOAT_IMAGE, "conversion"),
        ("DequantizeLinear", IMAGE, "conversion"),
        ("DynamicQuantizeMatMul", ("float", [1, 16]), "int8"),
        ("ReorderInput", FLOAT_IMAGE, "other"),
        ("Gather", ("int64", [1]), "other"),
    ],
)
def test_kind(op_type: str, first: Shaped, kind: str) -> None:
    dtype = "int64" if first[0] == "int64" else "float"
    (run,) = classify(read_kernel_runs([event("n", op_type, [first], (dtype, first[1]))]), {}, {}, {})
    assert run.kind == kind


def test_a_concat_takes_its_scales_first() -> None:
    concat = event(
        "n", "QLinearConcat", [("float", []), ("uint8", []), IMAGE, ("float", []), ("uint8", []), IMAGE], IMAGE
    )
    assert classify(read_kernel_runs([concat]), {}, {}, {})[0].kind == "int8"


def test_only_kernels_count() -> None:
    session_event = {"cat": "Session", "name": "session_initialization", "args": {}}
    fence_event = {"cat": "Node", "name": "n_fence_before", "args": {"op_name": "Conv"}}
    assert classify(read_kernel_runs([session_event, fence_event]), {}, {}, {}) == ()


@pytest.mark.parametrize(
    "name", ["conv", "conv_token_7", "conv_nchwc", "conv_token_7_nchwc", "conv/duplicated", "y", "relu"]
)
def test_renamed_nodes_are_recognised(name: str) -> None:
    macs, source_by_kernel = {"conv": 1000}, {"conv": "conv", "y": "conv", "relu": "conv"}
    weights = {name: (16, 16, 3, 3)}
    (run,) = classify(
        read_kernel_runs([event(name, "Conv", [FLOAT_IMAGE], FLOAT_IMAGE)]), weights, macs, source_by_kernel
    )
    assert (run.source, run.macs) == ("conv", 1000)


def test_an_activation_that_runs_by_itself_is_not_the_node_before_it() -> None:
    (run,) = classify(
        read_kernel_runs([event("relu", "Relu", [FLOAT_IMAGE], FLOAT_IMAGE)]), {}, {"conv": 1000}, {"relu": "conv"}
    )
    assert (run.source, run.macs) == ("relu", 0)


def test_the_scaling_behind_a_dynamic_node_is_not_the_node() -> None:
    ran = [
        event("conv_quant", "ConvInteger", [IMAGE], ("int32", [1, 16, 8, 8])),
        event("conv_quant_scales_mul", "Mul", [FLOAT_IMAGE], FLOAT_IMAGE),
    ]
    conv, scaling = classify(read_kernel_runs(ran), {"conv_quant": (16, 16, 3, 3)}, {"conv": 1000}, {"conv": "conv"})
    assert (conv.source, conv.macs, conv.kind) == ("conv", 1000, "int8")
    assert (scaling.source, scaling.macs) == ("conv_quant_scales_mul", 0)


def test_macs_from_shapes_where_the_name_is_lost() -> None:
    conv = event("fused_1", "QLinearConv", [IMAGE], ("uint8", [1, 8, 8, 32]))
    matmul = event("fused_2", "MatMulIntegerToFloat", [("uint8", [2, 5, 64])], ("float", [2, 5, 10]))
    runs = classify(read_kernel_runs([conv, matmul]), {"fused_1": (32, 16, 3, 3)}, {}, {})
    assert [run.macs for run in runs] == [8 * 8 * 32 * 16 * 9, 2 * 5 * 10 * 64]


def test_aliases() -> None:
    source = from_proto(float_source())
    macs = {name: count for name, count in node_macs(source).items() if count}
    assert list(macs) == ["conv"]
    assert map_kernel_names(source, macs) == {"conv": "conv", "c": "conv", "exp": "conv", "y": "conv"}
