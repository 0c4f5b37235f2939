"""Copy parts of a model: some nodes as a model of their own, or a model with more outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from edgeq.model.graph import named_values, reads


def with_outputs(model: ir.Model, names: Iterable[str]) -> ir.Model:
    """Return a copy of a model that also outputs the tensors `names`, after its own outputs. The types of these outputs
    stay unknown if the model does not state them; the runtime infers them.
    """
    observed = model.clone()
    values, present = named_values(observed.graph), {value.name for value in observed.graph.outputs}
    observed.graph.outputs.extend(values[name] for name in dict.fromkeys(names) if name not in present)
    return observed


_NEWEST_IR = 10


def part_of(
    model: ir.Model, nodes: Sequence[ir.Node], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> ir.Model:
    """Return some nodes of the main graph as a separate model, with the constants that they read. The shapes of its
    inputs and outputs are left open.
    """
    used = {value for node in nodes for value in reads(node)}
    view = ir.GraphView(
        inputs,
        outputs,
        nodes=nodes,
        initializers=[value for value in model.graph.initializers.values() if value in used],
        opset_imports=model.graph.opset_imports,
        name="part",
    )
    part = view.clone()
    forget_types(part)
    for value in (*part.inputs, *part.outputs):
        value.shape = None
    return ir.Model(part, ir_version=min(model.ir_version, _NEWEST_IR))


def forget_types(graph: ir.Graph) -> None:
    """Remove the types and shapes of all values except inputs and outputs, in place. Files then do not list them."""
    inside = (value for node in graph for value in node.outputs if not value.is_graph_output())
    for value in (*graph.initializers.values(), *inside):
        value.shape, value.type = None, None
