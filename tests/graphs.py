"""Models written as ONNX text: what a test is about, at a glance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
from onnx import numpy_helper


def proto(
    body: str,
    weights: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
    ir_version: int = 8,
    imports: str = "",
) -> onnx.ModelProto:
    """The protobuf of a graph in ONNX's text form, with the header that it needs.

    Args:
        body: `name (inputs) => (outputs) <initializers> { nodes }`; a node's name stands before it, in brackets.
            `float[] y` leaves the shape open. A name that is no identifier stands in quotes.
        weights: further initializers, arrays or numbers of numpy's by name.
        imports: further operator sets, as `, "com.microsoft": 1`.
    """
    domains = f'"": {opset}{imports}'
    if "com.microsoft" in body and "com.microsoft" not in imports:
        domains += ', "com.microsoft": 1'
    made = onnx.parser.parse_model(f"<ir_version: {ir_version}, opset_import: [{domains}]>\n{body}")
    tensors = (numpy_helper.from_array(np.asarray(values), name) for name, values in (weights or {}).items())
    made.graph.initializer.extend(tensors)
    return made


def model(
    body: str,
    weights: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
    ir_version: int = 8,
    imports: str = "",
) -> ir.Model:
    """`proto` as the in-memory model."""
    return ir.serde.deserialize_model(proto(body, weights, opset=opset, ir_version=ir_version, imports=imports))


def attributes(values: Mapping[str, Any]) -> str:
    """Attributes of a node in the text form: `<axis = 1, mode = "linear">`; "" for none."""
    return f"<{', '.join(f'{name} = {json.dumps(value)}' for name, value in values.items())}>" if values else ""
