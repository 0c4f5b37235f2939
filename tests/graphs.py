"""Build models from ONNX text, so that a test shows at a glance which model it uses."""

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
    """Return the protobuf of a graph in ONNX's text form, and add the header.

    Args:
        body: `name (inputs) => (outputs) <initializers> { nodes }`. The name of a node goes before it, in brackets.
            `float[] y` leaves the shape open. A name that is not an identifier goes in quotes.
        weights: further initializers by name, as arrays or numpy scalars.
        imports: further operator sets, for example `, "com.microsoft": 1`.
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
    """Return the graph of `proto` as an in-memory model."""
    return ir.serde.deserialize_model(proto(body, weights, opset=opset, ir_version=ir_version, imports=imports))


def attributes(values: Mapping[str, Any]) -> str:
    """Write the attributes of a node in the text form: `<axis = 1, mode = "linear">`. Return "" if there are none."""
    return f"<{', '.join(f'{name} = {json.dumps(value)}' for name, value in values.items())}>" if values else ""
