"""Test models with strings, sequences, optionals or unknown shapes as inputs, outputs or intermediate values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from edgeq_device.prepare.arrays import to_array
from onnx import TensorProto, helper

from edgeq.bundle.verify import verify_bundle
from edgeq.errors import ModelError
from edgeq.jobs.package import package
from edgeq.model.inspect import inspect_model
from tests.graphs import proto

PRODUCT = "[mm] h = MatMul(x, w)"
BODIES = {
    "sequence": f"{PRODUCT} y = Relu(h) s = SplitToSequence<axis = 1, keepdims = 1>(h)",
    "only a sequence": f"{PRODUCT} s = SplitToSequence<axis = 1, keepdims = 1>(h)",
    "optional": f"{PRODUCT} y = Relu(h) s = Optional(h)",
    "sequence inside": f"{PRODUCT} q = SequenceConstruct(h, h) y = ConcatFromSequence<axis = 1>(q)",
    "optional inside": f"{PRODUCT} q = Optional(h) y = OptionalGetElement(q)",
    "text": f"{PRODUCT} y = Relu(h) s = Identity(t)",
    "no shape": f"{PRODUCT} y = Relu(h)",
}


def built(kind: str, folder: Path) -> Path:
    body = BODIES[kind]
    model = proto(
        f"g (float[1, 8] x{', string[1] t' if kind == 'text' else ''}) => (float[1, 8] y) {{ {body} }}",
        {"w": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)},
        opset=18,
    )
    outputs = model.graph.output
    if kind.endswith("inside"):
        outputs[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    elif kind == "no shape":
        for value in (*model.graph.input, *outputs):
            value.type.tensor_type.ClearField("shape")
    elif kind == "text":
        outputs.append(helper.make_tensor_value_info("s", TensorProto.STRING, [1]))
    else:
        tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
        make = helper.make_optional_type_proto if kind == "optional" else helper.make_sequence_type_proto
        outputs.append(helper.make_value_info("s", make(tensor)))
        if kind.startswith("only"):
            del outputs[0]
    onnx.save(model, folder / "model.onnx")
    x = np.random.default_rng(1).normal(size=(6, 1, 8)).astype(np.float32)
    np.savez(folder / "x.npz", x=x, **({"t": np.array([["one"]] * 6)} if kind == "text" else {}))
    return folder / "model.onnx"


@pytest.mark.parametrize("kind", BODIES)
def test_they_are_packaged_and_proven(kind: str, tmp_path: Path) -> None:
    model = built(kind, tmp_path)
    names = {output.name for output in onnx.load(model).graph.output}
    targets = ("this-machine", "nvidia-t4")
    made = package(model, tmp_path / "x.npz", tmp_path / "bundle", targets=targets, timed=False)
    for variant in made.variants.values():
        compared = {output.name: output.sqnr_db for output in variant.proof.agreement.outputs}
        assert compared.keys() == names - ({"s"} if kind == "text" else set())
        assert min(compared.values()) > 25
    report = verify_bundle(tmp_path / "bundle")
    assert report.passed
    assert {
        output.name for variant in report.variants if variant.selftest for output in variant.selftest.outputs
    } == names


def test_a_sequence_is_one_array_of_its_elements() -> None:
    parts = [np.float32([[1, 2]]), np.float32([[3]]), None]
    np.testing.assert_array_equal(to_array(parts), np.float32([1, 2, 3]))
    assert to_array(np.array(["a", "bc"], object)).dtype == "<U2"
    assert to_array([]).size == 0


def test_a_sequence_as_an_input_is_refused(tmp_path: Path) -> None:
    """A sequence as an input is refused, because no format of samples can contain one."""
    model = onnx.load(built("sequence inside", tmp_path))
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [1, 8])
    model.graph.input.append(helper.make_value_info("s", helper.make_sequence_type_proto(tensor)))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="'s' is a sequence"):
        inspect_model(tmp_path / "model.onnx")
