"""Test operands that become constants at a fixed size: they have no Q/DQ pair, because some engines fail on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.jobs.quantize import quantize
from edgeq.run.engines import load_engines
from edgeq.run.session import Engines, SessionSettings
from tests.plugins import needs_plugin

# Adds as many rows of a table to a product as the input has.
POSITIONS = """<ir_version: 8, opset_import: ["": 17]>
positions (float[N, S, 16] x) => (float[N, S, 16] y)
<int64[1] zero = {{0}}, int64[1] one = {{1}}>
{{
    [first] h = MatMul(x, first)
    shape = Shape(x)
    length = Gather(shape, one)
    [slice] rows = Slice(table, zero, length, one)
    [meet] s = {operator}
    [last] y = MatMul(s, last)
}}"""


def positions(path: Path, operator: str) -> Path:
    """Write the model, with `operator` between the table and the product."""
    random = np.random.default_rng(0)
    model = onnx.parser.parse_model(POSITIONS.format(operator=operator))
    sizes = {"first": (16, 16), "last": (16, 16), "table": (1, 64, 16)}
    for name, size in sizes.items():
        values = random.uniform(0.1, 1, size).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(model, str(path))
    return path


SUMS = ["Add(h, rows)", "Add(rows, h)", "Sub(rows, h)", "Mul(h, rows)"]


@pytest.mark.parametrize("operator", SUMS)
def test_no_pair_stands_before_a_constant_of_the_sizes(operator: str, tmp_path: Path) -> None:
    data = np.random.default_rng(1).standard_normal((8, 4, 16)).astype(np.float32)
    built = tmp_path / "int8.onnx"
    quantize(
        positions(tmp_path / "m.onnx", operator), [{"x": row[None]} for row in data], built, effort=None, timed=False
    )
    model = onnx.load(built)
    (meet,) = [node for node in model.graph.node if node.name == "meet"]
    assert "rows" in meet.input
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("DequantizeLinear") > kinds.count("QuantizeLinear") > 0, "the products are quantized"


@needs_plugin("openvino")
@pytest.mark.parametrize("operator", SUMS)
def test_openvino_takes_the_file_at_fixed_sizes(operator: str, tmp_path: Path) -> None:
    data = np.random.default_rng(1).standard_normal((8, 4, 16)).astype(np.float32)
    built = tmp_path / "int8.onnx"
    quantize(
        positions(tmp_path / "m.onnx", operator), [{"x": row[None]} for row in data], built, effort=None, timed=False
    )
    model = onnx.load(built)
    for value in (*model.graph.input, *model.graph.output):
        for axis, size in enumerate((1, 4)):
            value.type.tensor_type.shape.dim[axis].dim_value = size
    onnx.save(model, str(built))
    settings = SessionSettings(engine=load_engines()["openvino"])
    with Engines() as engines:
        assert engines.open(built, settings).run(None, {"x": data[:1]})[0].shape == (1, 4, 16)
