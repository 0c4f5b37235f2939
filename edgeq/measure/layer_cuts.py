"""Cut a model into layers, and add inputs for disturbances, so that one session can run every layer alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from edgeq.measure.match_activations import ActivationMatch
from edgeq.model.edit import Editor
from edgeq.model.graph import GraphIndex, named_values
from edgeq.model.shapes import element_types


def cut_layers(
    graph: GraphIndex, matches: Sequence[ActivationMatch], exact: Collection[tuple[str, str]] = ()
) -> ir.Model:
    """Return a copy of a model in which the inputs of every layer become inputs of the model.

    A node that reads the tensor `computed` of a match reads the new float input `entry_name(match)` instead. If the
    node needs integers, the input is quantized first. So the tensor `computed` of each match is the result of its layer
    alone, on exact inputs. Tensors that the bodies of If, Loop and Scan read stay connected.

    Args:
        exact: (tensor, node) pairs from `find_exact_readers`. These nodes read `exact_entry_name(match)` instead.
    """
    # Bodies of If, Loop and Scan read a tensor by its name, so the tensor cannot be replaced for them.
    match_by_tensor = {m.computed: m for m in matches if m.computed not in graph.captured}
    types = element_types(graph)
    cut = graph.model.clone()
    editor, values = Editor(cut), named_values(cut.graph)
    first_node = next(iter(cut.graph), None)
    for name, match in match_by_tensor.items():
        entries: dict[str, ir.Value] = {}
        # The list is a copy, because each replacement changes the uses.
        for node, place in list(values[name].uses()):
            entry = exact_entry_name(match) if (match.name, node.name) in exact else entry_name(match)
            if entry not in entries:
                entries[entry] = _float_input(cut.graph, entry, types.get(name))
                if match.integer:
                    assert match.params is not None, "integers that are matched have a scale"
                    # In front of all nodes, because any of them may read the integers.
                    entries[entry] = editor.quantize(
                        entries[entry], match.params, f"{entry}/integers", before=first_node
                    )
            node.replace_input_with(place, entries[entry])
    return cut


def entry_name(match: ActivationMatch) -> str:
    """Return the name of the cut model's input for the float tensor of a match."""
    return f"{match.computed}/given"


def exact_entry_name(match: ActivationMatch) -> str:
    """Return the name of the input for nodes that read the tensor before it is quantized."""
    return f"{match.computed}/exact"


def add_disturbances(
    float_graph: GraphIndex, names: Collection[str], exact: Collection[tuple[str, str]] = ()
) -> ir.Model:
    """Return a copy of a float model in which a new input is added to each tensor of `names`. All readers read the sum.

    The input is called `disturbance_name(name)`. It has the tensor's type, and the tensor's shape or one that
    broadcasts to it. If the tensor is an output, the sum replaces it at the same position under another name.

    Args:
        exact: (tensor, node) pairs from `find_exact_readers`. For these nodes, the input is
            `exact_disturbance_name(name)`.
    """
    types = element_types(float_graph)
    disturbed = float_graph.model.clone()
    editor, values = Editor(disturbed), named_values(disturbed.graph)
    graph, nodes = disturbed.graph, list(disturbed.graph)
    following = dict(zip(nodes, [*nodes[1:], None], strict=True))

    def entry_of(name: str, reader: str) -> str:
        """Return the name of the disturbance that a reader of the tensor gets. The reader "" means the graph's
        outputs.
        """
        return exact_disturbance_name(name) if (name, reader) in exact else disturbance_name(name)

    for name in dict.fromkeys(names):
        value = values[name]
        maker = value.producer()
        next_node = following[maker] if maker is not None else nodes[0]
        uses = [(use, entry_of(name, use.node.name or "")) for use in value.uses() if use.node.graph is graph]
        # The readers are listed before the Add is made, because the Add reads the tensor too.
        outputs = [(place, entry_of(name, "")) for place, output in enumerate(graph.outputs) if output is value]
        sums = {}
        for entry in dict.fromkeys(entry for _, entry in [*uses, *outputs]):
            added = _float_input(graph, entry, types.get(name))
            sums[entry] = editor.node("Add", [value, added], f"{entry}/added", before=next_node, like=value)
        for use, entry in uses:
            use.node.replace_input_with(use.idx, sums[entry])
        for place, entry in outputs:
            graph.outputs[place] = sums[entry]
    return disturbed


def disturbance_name(name: str) -> str:
    """Return the name of the input that is added to a tensor for all readers except those in `find_exact_readers`."""
    return f"{name}/disturbance"


def exact_disturbance_name(name: str) -> str:
    """Return the name of the input that is added for nodes that read the tensor before it is quantized."""
    return f"{name}/exact disturbance"


def _float_input(graph: ir.Graph, name: str, like: ir.DataType | None) -> ir.Value:
    """Add an input of unknown shape to a graph. Its type is float16 if `like` is float16, else float32."""
    dtype = ir.DataType.FLOAT16 if like == ir.DataType.FLOAT16 else ir.DataType.FLOAT
    value = ir.Value(name=name, type=ir.TensorType(dtype))
    graph.inputs.append(value)
    return value
