"""Why a node of the float model runs in float, by the scheme and the backend's rules."""

from __future__ import annotations

import onnx_ir as ir

from edgeq.graph.index import GraphIndex
from edgeq.graph.query import name_of
from edgeq.measure.coverage import Explain
from edgeq.model.int8_prediction import predict_int8, stacked_products
from edgeq.model.int8_rules import int8_rules
from edgeq.model.prepare import PreparedModel
from edgeq.pipeline.job import Built
from edgeq.scheme import Scheme

ON_REQUEST = "kept in float on request"
_FOREIGN = "{} is not among the operator types that the scheme quantizes"
_PRODUCTS = ("MatMul", "Gemm")


def explainer(prepared: PreparedModel, built: Built) -> Explain:
    """(node, operator type) → the reason, by the scheme that was built and the backend's rules."""
    model, scheme, backend = prepared.model, built.artifact.scheme, built.target.backend
    return _static(model, scheme, backend) if scheme.mode == "static" else _at_run_time(model, scheme)


def _static(model: ir.Model, scheme: Scheme, backend: str) -> Explain:
    prediction = {node.name: node for node in predict_int8(model, int8_rules(backend))}
    stacked = stacked_products(model) if scheme.per_channel else frozenset()

    def explain(name: str, op_type: str) -> str:
        """Why the node is not in int8: the scheme first, then the backend's rules, then the optimiser's fusions."""
        node = prediction.get(name)
        kind = node.op_type if node else op_type
        if name in scheme.exclude:
            return ON_REQUEST
        if scheme.op_types and kind not in scheme.op_types:
            return _FOREIGN.format(kind)
        if node is None:
            return "ONNX Runtime's optimiser made it of nodes that are not all in int8"
        if node.verdict == "float":
            return node.reason
        if name in stacked:
            return "its constant is no matrix, which cannot have one scale per channel; --no-per-channel quantizes it"
        return "it could run in int8, but what surrounds it is not all in int8, so ONNX Runtime did not fuse it"

    return explain


def _at_run_time(model: ir.Model, scheme: Scheme) -> Explain:
    """For dynamic and weight-only quantization, where only products with constant matrices are in int8."""
    index = GraphIndex(model)
    nodes, constants = index.nodes, index.computed_constants
    types = scheme.quantized_types or frozenset()

    def explain(name: str, op_type: str) -> str:
        """Why the node is not in int8: the scheme first, then what run-time quantization takes."""
        node = nodes.get(name)
        kind = node.op_type if node else op_type
        if name in scheme.exclude:
            return ON_REQUEST
        whole = name.partition("/")[0]
        if node is None and whole in nodes and nodes[whole].op_type == "GRU":
            return f"of {whole}, only the products run in int8"
        if kind not in types:
            return _FOREIGN.format(kind)
        if node is not None and kind in _PRODUCTS and not constants.intersection(map(name_of, node.inputs[:2])):
            return f"it multiplies two activations; {scheme.mode} quantization takes constant matrices"
        if kind == "GRU":
            return "it is too narrow to gain by integer products, or of a form that is not written out with them"
        return "onnxruntime's quantizer left it in float"

    return explain
