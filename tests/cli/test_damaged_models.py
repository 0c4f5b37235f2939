"""Test models that parse but contain something meaningless: edgeq refuses them in one line that names the file."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest

from edgeq.errors import ModelError
from tests.cli.workspace import Workspace, branch, loop, network, random
from tests.graphs import proto


def calling(inputs: list[str], outputs: list[str]) -> onnx.ModelProto:
    """Return a model with a MatMul, then a call of a function with two inputs and one output."""
    made, read = ", ".join(outputs), ", ".join(inputs)
    body = f"""calls (float[1, 8] x) => (float[1, 4] {outputs[0]}) {{
        [matmul] m = MatMul(x, w)
        [call] {made} = local.F({read})
    }}
    <domain: "local", opset_import: ["": 17]> F (a, b) => (c) {{ c = Add(a, b) }}"""
    return proto(body, {"w": random(8, 4)}, imports=', "local": 1')


def typed(kind: int) -> onnx.ModelProto:
    """Return a model that declares the element type `kind` for a value between its nodes."""
    model = network()
    value = model.graph.value_info.add(name="c")
    value.type.tensor_type.elem_type = kind
    return model


def returning(model: onnx.ModelProto, op_type: str, outputs: list[str]) -> onnx.ModelProto:
    """Rename the outputs of the node with this operator, although its body still gives the old ones."""
    node = next(node for node in model.graph.node if node.op_type == op_type)
    node.output[:] = outputs
    return model


def holding(change: Callable[[onnx.GraphProto], object]) -> onnx.ModelProto:
    model = network()
    change(model.graph)
    return model


CASES = {
    "more inputs than the function": calling(["m", "m", "m"], ["y"]),
    "no inputs for the function": calling([], ["y"]),
    "more outputs than the function": calling(["m", "m"], ["y", "z"]),
    "unknown element type": typed(77),
    "negative element type": typed(-1),
    "more outputs than the loop": returning(loop(), "Loop", ["l", "m", "n", "o"]),
    "no output of the loop": returning(loop(), "Loop", []),
    "more outputs than the branches": returning(branch(), "If", ["b", "c", "d"]),
    "unknown type of a sequence": holding(
        lambda graph: setattr(graph.value_info.add(name="r").type.sequence_type.elem_type.tensor_type, "elem_type", 55)
    ),
    "an initializer twice": holding(lambda graph: graph.initializer.append(graph.initializer[0])),
    "an initializer without a name": holding(
        lambda graph: graph.initializer.add(data_type=1, dims=[1], raw_data=b"0000")
    ),
    "an output that nothing makes": holding(lambda graph: setattr(graph.output[0], "name", "nowhere")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_without_meaning(workspace: Workspace, name: str) -> None:
    """A meaningless model is refused in one line, or accepted if the fault does not matter, but never ends in a
    traceback.
    """
    (workspace.path / "odd.onnx").write_bytes(CASES[name].SerializeToString())
    for command in (("inspect", "odd.onnx"), ("calibrate", "odd.onnx", "--data", "x.npz", "-o", "CAL")):
        ran = workspace.run(*command)
        assert ran.code in (0, ModelError.exit_code, 4), ran.err
        assert "Traceback" not in ran.err
        if ran.code == ModelError.exit_code:
            assert ran.line.startswith("edgeq: ")
            assert "odd.onnx" in ran.line
