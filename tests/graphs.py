"""Models written as ONNX text: what a test is about, at a glance."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir


def proto(body: str, *, opset: int = 17, ir_version: int = 8, imports: str = "") -> onnx.ModelProto:
    """The protobuf of a graph in ONNX's text form, with the header that it needs.

    Args:
        body: `name (inputs) => (outputs) <initializers> { nodes }`; a node's name stands before it, in brackets.
        imports: further operator sets, as `, "com.microsoft": 1`.
    """
    domains = f'"": {opset}{imports}'
    if "com.microsoft" in body and "com.microsoft" not in imports:
        domains += ', "com.microsoft": 1'
    return onnx.parser.parse_model(f"<ir_version: {ir_version}, opset_import: [{domains}]>\n{body}")


def model(body: str, *, opset: int = 17, ir_version: int = 8, imports: str = "") -> ir.Model:
    """`proto` as the in-memory model."""
    return ir.serde.deserialize_model(proto(body, opset=opset, ir_version=ir_version, imports=imports))
