"""Why a node of the float model runs in float, by the scheme and the backend's rules."""

from __future__ import annotations

from edgeq.engines import Engine
from edgeq.measure.coverage import Explain
from edgeq.model.int8_prediction import NodePrediction, foreign
from edgeq.pipeline.job import Built
from edgeq.scheme import ALL_NODES, Scheme


def explainer(built: Built, predicted: tuple[NodePrediction, ...]) -> Explain:
    """(node, operator type) → the reason: the scheme first, then the backend's rules, then the optimiser's fusions.

    Args:
        predicted: of the prepared model under the scheme that was built.
    """
    scheme, plugin = built.artifact.scheme, built.artifact.plugin
    known = {node.name: node for node in predicted}

    def explain(name: str, op_type: str) -> str:
        """See `explainer`."""
        node = known.get(name)
        if node is not None and node.verdict == "float":
            return node.reason
        if plugin is not None:
            return _in_plugin(plugin.engine, scheme, node.op_type if node else op_type)
        if scheme.mode == "weight-only" and {name, ALL_NODES}.intersection(scheme.float_compute or ()):
            return "its weights in blocks are expanded to float as it computes"
        if scheme.mode == "static":
            if node is None:
                return "ONNX Runtime's optimiser made it of nodes that are not all in int8"
            return "it could run in int8, but what surrounds it is not all in int8, so ONNX Runtime did not fuse it"
        whole = known.get(name.partition("/")[0])
        if node is None and whole is not None and whole.op_type == "GRU":
            return f"of {whole.name}, only the products run in int8"
        kind = node.op_type if node else op_type
        if kind not in (scheme.quantized_types or ()):
            return foreign(kind)
        if kind == "GRU":
            return "it is too narrow to gain by integer products, or of a form that is not written out with them"
        return "onnxruntime's quantizer left it in float"

    return explain


def _in_plugin(engine: Engine, scheme: Scheme, op_type: str) -> str:
    if scheme.mode == "float":
        return "nothing is quantized"
    if scheme.pair not in engine.int8.pairs:
        return f"{engine.name} has no integer kernels for {scheme.pair}"
    if engine.int8.operators and op_type not in engine.int8.operators:
        return f"{engine.name} has no integer form of {op_type}"
    return f"it could run in int8, but what surrounds it is not all in int8, so {engine.name} did not fuse it"
