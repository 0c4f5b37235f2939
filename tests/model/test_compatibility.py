"""Test which onnxruntime a model needs, by the probed table."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from edgeq.errors import ModelError
from edgeq.model.compatibility import compatibility
from edgeq.model.convert import to_bytes
from edgeq.run.session import onnxruntime
from tests.graphs import model


def integer_conv(weight: str, *, opset: int = 17, ir_version: int = 8) -> ir.Model:
    net = f"net (uint8[1,1,2,2] x) => (int32[1,1,2,2] y) <{weight}[1,1,1,1] w = {{1}}> {{ y = ConvInteger (x, w) }}"
    return model(net, opset=opset, ir_version=ir_version)


def test_a_kernel_that_came_late() -> None:
    found = compatibility(integer_conv("int8"), "x86_64")
    assert found.minimum == "1.24"
    assert found.requirements[0].what == "ConvInteger u8s8"
    assert found.runs_on("1.24.1")
    assert found.runs_on("1.31.1")
    assert not found.runs_on("1.22")
    assert "too old: ConvInteger u8s8 needs 1.24" in found.explain("1.22")
    assert found.probed


def test_a_kernel_that_was_always_there() -> None:
    assert compatibility(integer_conv("uint8"), "x86_64").minimum == "1.16"


def test_opset_and_ir_version() -> None:
    assert compatibility(integer_conv("uint8", opset=21), "x86_64").minimum == "1.18"
    assert compatibility(integer_conv("uint8", ir_version=10), "x86_64").minimum == "1.18"
    with pytest.raises(ModelError, match="reads opset 99"):
        compatibility(integer_conv("uint8", opset=99), "x86_64")


def test_an_architecture_that_was_not_probed_says_so() -> None:
    found = compatibility(integer_conv("int8"), "riscv64")
    assert not found.probed
    assert found.minimum == "1.24"


@pytest.mark.parametrize("weight", ["int8", "uint8"])
def test_the_installed_release_agrees(weight: str) -> None:
    made = integer_conv(weight)
    assert compatibility(made).runs_on(onnxruntime().__version__)
    onnxruntime().InferenceSession(to_bytes(made), providers=["CPUExecutionProvider"])


def test_the_integers_of_a_bias_name_no_kernel() -> None:
    net = model("""net (float[1,4] x) => (float[1,4] y) <float s = {0.5}, int8 z = {0}, int32[4] b = {1, 2, 3, 4}> {
        q = QuantizeLinear (x, s, z)
        d = DequantizeLinear (q, s, z)
        c = DequantizeLinear (b, s)
        y = Add (d, c)
    }""")
    needs = [requirement.what for requirement in compatibility(net, "x86_64").requirements]
    assert sorted(needs) == ["DequantizeLinear s8", "IR version 8", "QuantizeLinear s8", "opset 17"]
