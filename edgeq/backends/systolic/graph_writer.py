"""What the writers of both files share: nodes and constants so far, and the model that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgeq.backends.systolic.program import Program
from edgeq.signature import Signature, TensorSpec


class GraphWriter:
    """Collects the ONNX form of `program`."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def _model(
        self, signature: Signature, opsets: Sequence[onnx.OperatorSetIdProto], ir_version: int
    ) -> onnx.ModelProto:
        inputs = [_value(spec) for spec in signature.inputs]
        outputs = [_value(spec) for spec in signature.outputs]
        graph = helper.make_graph(self._nodes, self._program.name, inputs, outputs, list(self._constants.values()))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
        model.producer_name = "edgeq"
        return model

    def _node(self, op_type: str, inputs: Sequence[str], output: str, name: str, **attributes: Any) -> None:
        domain = attributes.pop("domain", "")
        plain: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items()}
        self._nodes.append(helper.make_node(op_type, list(inputs), [output], name=name, domain=domain, **plain))

    def _scale(self, tensor: str) -> str:
        scale = self._program.tensors[tensor].scale
        assert scale is not None
        return self._constant(f"{tensor}/scale", np.array(scale, np.float32))

    def _zero(self) -> str:
        return self._constant("int8/0", np.array(0, np.int8))

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), name)
        return name


def _value(spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(spec.name, helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), spec.shape)
