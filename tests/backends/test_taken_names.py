"""Test models whose tensors have names that quantizers use for their own: scales, zero points, integers, outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.data.open_source import Data
from edgeq.errors import ModelError
from edgeq.jobs.quantize import Quantized, quantize
from edgeq.model.clean import separate_names
from edgeq.model.edit import from_proto
from tests.cli.workspace import random
from tests.graphs import proto

MODES: dict[str, dict[str, Any]] = {"QDQ": {}, "QOperator": {"format": "QOperator"}, "dynamic": {"mode": "dynamic"}}
MADE = ("scale", "zero_point", "quantized", "QuantizeLinear_Output", "QuantizeLinear_Input", "DequantizeLinear_Output")


def network(**names: str) -> onnx.ModelProto:
    """Return two products with a Relu between them. `names` gives tensors other names, by their default names."""
    x, w, m, r, v, y = (names.get(key, key) for key in "xwmrvy")
    body = f"""g (float[1, 64] {x}) => (float[1, 5] {y}) {{
        [first] {m} = MatMul({x}, {w})
        [relu] {r} = Relu({m})
        [second] {y} = MatMul({r}, {v})
    }}"""
    return proto(body, {w: random(64, 64), v: random(64, 5)})


def quantized(place: Path, net: onnx.ModelProto, mode: str) -> Quantized:
    onnx.save(net, place / "net.onnx")
    np.savez(place / "x.npz", **{net.graph.input[0].name: random(8, 64)})
    data, output = Data(str(place / "x.npz")), place / "int8.onnx"
    how: dict[str, Any] = {"target": "x86-64-avx512-vnni", "overrides": MODES[mode], "timed": False, "emulate": False}
    return quantize(place / "net.onnx", data, output, force=True, **how)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MADE)
def test_inner_tensors_give_way(tmp_path: Path, mode: str, name: str) -> None:
    for stem, taken in (("x", "w"), ("x", "m"), ("m", "x"), ("r", "y"), ("w", "r")):
        net = network(**{taken: f"{stem}_{name}"})
        found = quantized(tmp_path, net, mode)
        assert found.proof.agreement.sqnr_db > 18, (stem, taken)
        written = onnx.load(tmp_path / "int8.onnx").graph
        for before, after in ((net.graph.input, written.input), (net.graph.output, written.output)):
            assert [value.name for value in before] == [value.name for value in after]


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("QOperator", {"x": "y_quantized"}),
        ("dynamic", {"y": "x_scale"}),
    ],
)
def test_two_names_of_the_interface_are_one_line(tmp_path: Path, mode: str, names: dict[str, str]) -> None:
    (name,) = names.values()
    with pytest.raises(
        ModelError, match=rf"net\.onnx: quantization gives the name '{name}' to a tensor that it makes for"
    ):
        quantized(tmp_path, network(**names), mode)
    assert not (tmp_path / "int8.onnx").exists()


@pytest.mark.parametrize("name", ["y_quantized", "y_scale", "y_QuantizeLinear_Input"])
def test_names_of_the_interface_are_left_alone_in_pairs(tmp_path: Path, name: str) -> None:
    quantized(tmp_path, network(x=name), "QDQ")


def test_renames_only_clashing_tensors() -> None:
    net = network(w="x_scale", v="other_scale", r="x_scale_of_mine")
    renamed = from_proto(net)
    assert separate_names(renamed) == ("x_scale", "x_scale_of_mine")
    assert separate_names(renamed) == (), "another time there is nothing left"
    assert [value.name for node in renamed.graph for value in node.inputs if value is not None] == [
        "x", "x_scale/1", "m", "x_scale_of_mine/1", "other_scale",
    ]  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_copies_of_a_shared_bias(tmp_path: Path, shared: bool) -> None:
    """Two layers share one "bias", as TensorFlow's zeros are. onnxruntime's quantizer calls its copy "bias0", and a
    tensor has that name.
    """
    body = f"""g (float[1, 64] x) => (float[1, 64] y) {{
        [first] bias0 = Gemm(x, w, bias)
        [relu] r = Relu(bias0)
        [second] y = Gemm(r, v{", bias" if shared else ""})
    }}"""
    weights = {"w": random(64, 64), "v": random(64, 64), "bias": random(64)}
    found = quantized(tmp_path, proto(body, weights), "QDQ")
    assert found.proof.agreement.sqnr_db > 18
    assert any("1 tensor renamed" in note for note in found.notes) == shared
