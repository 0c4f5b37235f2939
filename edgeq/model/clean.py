"""Clean a graph: remove dead code, name and sort the nodes, and recognise files that are not models."""

from __future__ import annotations

import heapq
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
from edgeq_device.bundle.manifest import MANIFEST
from edgeq_device.system.files import open_file
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveInitializersFromInputsPass

from edgeq.errors import ModelError, OutputError
from edgeq.model.edit import drop_unused_initializers, replace_node
from edgeq.model.graph import bodies, constant, is_random, node_input, operator_of


def tidy(model: ir.Model) -> int:
    """Turn weights into constants that no input can override, turn Constant nodes into initializers, and remove dead
    code.

    Returns:
        The number of nodes that were removed because no output depends on them.
    """
    RemoveInitializersFromInputsPass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    dropped, previous_count = 0, -1
    while dropped != previous_count:  # The next round removes a node that was used only by a dead node in a branch.
        previous_count = dropped
        dropped += sum(_drop_dead(graph) for graph in model.graphs())
    return dropped


def forget_origin(model: ir.Model) -> None:
    """Remove, in place, the exporter's notes on where nodes and inner tensors come from: source lines, stack traces,
    module paths. No runtime reads these notes. They contain file names of the exporting machine, and PyTorch's notes
    can take more space than the weights of a small int8 model. The descriptions of the model, its inputs and its
    outputs stay.
    """
    for graph in model.graphs():
        graph.metadata_props.clear()
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                if not value.is_graph_output():
                    value.metadata_props.clear()
                    value.doc_string = None


def remove_no_ops(model: ir.Model) -> int:
    """Bypass, in place, nodes that change nothing: Identity, Dropout outside training mode, and some Casts and Pads.

    - If the node's output is not a graph output, all nodes that read it read the node's input instead.
    - If the node's output is a graph output, the node's input takes over its name. This is possible only if a node of
      the same graph computes that input, and the input is not a graph output itself.
    - In all other cases the node stays, because its output is a second name for a graph input, a weight or another
      graph output.

    Returns:
        The number of nodes that were removed.
    """
    removed = 0
    for graph in model.graphs():
        for node in list(graph):
            if _does_nothing(node) and _bypass(node, graph):
                removed += 1
    return removed


def _does_nothing(node: ir.Node) -> bool:
    if node.domain != "" or not node.inputs or node.inputs[0] is None:
        return False
    if node.op_type == "Identity":
        return True
    if node.op_type == "Cast":
        return node.inputs[0].dtype is not None and node.inputs[0].dtype == node.attributes.get_int("to", 0)
    if node.op_type == "Pad":
        pads = constant(node_input(node, 1))
        return pads is not None and not pads.any()
    return node.op_type == "Dropout" and not _is_mask_used(node) and not is_random(node)


def _is_mask_used(node: ir.Node) -> bool:
    return any(o.uses() or o.is_graph_output() for o in node.outputs[1:])


def _bypass(node: ir.Node, graph: ir.Graph) -> bool:
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None
    if not output.is_graph_output():
        output.replace_all_uses_with(source)
        graph.remove(node, safe=True)
        return True
    producer = source.producer()
    if producer is None or producer.graph is not graph or source.is_graph_output():
        return False
    replace_node(node, source)
    return True


def _release(node: ir.Node) -> None:
    """Disconnect the bodies inside a node from all values. Otherwise the uses of a value would still include nodes of
    removed bodies.
    """
    for body in bodies(node):
        for inner in body.all_nodes():
            for place in range(len(inner.inputs)):
                inner.replace_input_with(place, None)


def _drop_dead(graph: ir.Graph) -> int:
    """Remove unused nodes and weights, and return the number of removed nodes. The pass of onnx-ir is not used, because
    up to release 1.0 it also switches BatchNormalization out of training mode, which changes results.
    """
    dead = 0
    for node in reversed(graph):
        if not any(o.uses() or o.is_graph_output() for o in node.outputs):
            _release(node)
            graph.remove(node, safe=True)
            dead += 1
    drop_unused_initializers(graph)
    return dead


_ZIP = b"PK\x03\x04"
# (offset, first bytes, file type, what to do)
_SIGNATURES = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the model itself", "Fetch the model with `git lfs pull`"),
    (0, _ZIP, "a zip archive, such as a PyTorch checkpoint or a cut bundle", "Export the model with torch.onnx.export"),
    (0, b"\x80\x02", "a Python pickle, such as an old PyTorch checkpoint", "Export the model with torch.onnx.export"),
    (0, (b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a Python pickle", "Export the model to ONNX where it was trained"),
    (0, b"\x89HDF", "an HDF5 file, such as a Keras model", "Convert it with tf2onnx"),
    (4, b"TFL3", "a TensorFlow Lite model", "Convert it with tf2onnx --tflite"),
    (4, b"ORTM", "a model in ONNX Runtime's own .ort format", "Give the .onnx file that it was made from"),
    (0, b"\x1f\x8b", "a gzip archive", "Unpack it first"),
    (0, b"\x93NUMPY", "a NumPy array", "Pass arrays as data (--data), and give the ONNX model here"),
    (0, b"\x89PNG", "a PNG image", "Pass images as data (--data), and give the ONNX model here"),
    (0, b"\xff\xd8\xff", "a JPEG image", "Pass images as data (--data), and give the ONNX model here"),
)
_SNIFFED = 4096
BUNDLE = ".edgeq"
BUNDLES_GO = "`edgeq verify`, `eval`, `bench` and `compare` take bundles"


def check_model_name(output: Path) -> None:
    """Refuse to write a model to a path with the suffix of a bundle. Programs would open the model as a bundle.

    Raises:
        OutputError: `output` has the suffix of a bundle.
    """
    if is_named_bundle(output):
        fix = "Name it .onnx; `edgeq package` writes bundles"
        raise OutputError(f"{output} has the suffix of a bundle, but this command writes a model", fix)


def check_bundle_name(output: Path) -> None:
    """Refuse to write a bundle to a path with the suffix of a model.

    Raises:
        OutputError: `output` has the suffix .onnx.
    """
    if output.suffix.lower() == ".onnx":
        fix = f"Name a directory, or a file that ends in {BUNDLE}; `edgeq quantize` writes a model alone"
        raise OutputError(f"{output} has the suffix of a model, but this command writes a bundle", fix)


def is_named_bundle(path: Path) -> bool:
    """Return whether `path` has the suffix of a single-file bundle, in upper or lower case."""
    return path.suffix.lower() == BUNDLE


def is_archived_bundle(path: Path) -> bool:
    """Return whether the file at `path` is a single-file bundle, whatever its name is.

    Raises:
        OSError: the file cannot be read.
    """
    with open_file(path) as stream:
        if stream.read(len(_ZIP)) != _ZIP:
            return False
        try:
            with zipfile.ZipFile(stream) as archive:
                return MANIFEST in archive.namelist()
        except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
            return False


def likely_cause(content: bytes, path: Path) -> tuple[str, str]:
    """Return (the problem, the solution) for bytes that do not parse as an ONNX model."""
    head = content[:_SNIFFED]
    if is_named_bundle(path):
        return "it has the suffix of a bundle", f"Give the .onnx file that it was made from; {BUNDLES_GO}"
    for offset, signature, file_type, fix in _SIGNATURES:
        if head.startswith(signature, offset):
            return f"it is {file_type}", fix
    if _is_text(head):
        return "it is a text file", "Give the .onnx file; if this was downloaded, it may be an error page"
    if path.suffix == ".onnx":
        return "it is damaged or truncated", "Export or download it again, and compare its size or checksum"
    return "it is not an ONNX protobuf", "Export the model to ONNX first"


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        # The bytes that were read may end in the middle of a character.
        if error.start < len(head) - 3 or len(head) < _SNIFFED:
            return False
        text = head[: error.start].decode("utf-8")
    return all(c.isprintable() or c in "\r\n\t\f" for c in text)


# Suffixes that quantizers append to a tensor's name. They name its scale, its integers and the outputs of its Q/DQ
# pair.
_DERIVED_NAME = re.compile(r"_(?:(?:output_)?quantized|scale|zero_point|QuantizeLinear|DequantizeLinear)")


def name_nodes(model: ir.Model) -> int:
    """Give a new, unique name to each node that has no name or the name of an earlier node, in place.

    A new name is the old name (or the operator type) plus a number. A random operator without a name gets the name of
    its output (`edgeq.run.draws`). The names depend only on the graph. Nodes of bodies also get names that differ from
    those of all other nodes.

    Returns:
        The number of nodes that were renamed.
    """
    changed = 0
    for node, name in node_names(model).items():
        if node.name != name:
            node.name = name
            changed += 1
    return changed


def node_names(model: ir.Model) -> dict[ir.Node, str]:
    """Return each node with the name that `name_nodes` would give it. The nodes of the main graph come before those of
    bodies.
    """
    nodes = [node for graph in model.graphs() for node in graph]
    used_names = {node.name or "" for node in nodes}
    assigned_names = {""}
    names: dict[ir.Node, str] = {}
    for position, node in enumerate(nodes):
        name = node.name or ""
        if not name and is_random(node):
            # The numbers that measurements give to a nameless node depend on the name of its output.
            output = next((output.name for output in node.outputs if output.name), "")
            name = output if output not in used_names else ""
        if name in assigned_names:
            name = _find_free_name(name or node.op_type, position, used_names)
            used_names.add(name)
        assigned_names.add(name)
        names[node] = name
    return names


def clashing_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names that a quantizer may also give to a new tensor. Each name is mapped to the name of the tensor
    from which the new tensor would be derived.
    """
    present_names = set(names)
    return {
        name: name[: match.start()]
        for name in sorted(present_names)
        for match in _DERIVED_NAME.finditer(name)
        if "/" not in name[match.end() :] and name[: match.start()] in present_names
    }


def separate_names(model: ir.Model) -> tuple[str, ...]:
    """Rename inner tensors, in place, if a quantizer would give their name to a tensor that it derives from another
    tensor. Inputs and outputs of the model keep their names: if one tensor of such a pair is an input or output, the
    other is renamed.

    Returns:
        The names that no longer exist.
    """
    signature_names = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    inner: dict[str, list[ir.Value]] = {}
    for graph in model.graphs():
        outputs = (output for node in graph for output in node.outputs)
        for value in dict.fromkeys((*graph.inputs, *graph.initializers.values(), *outputs)):
            if value.name:
                inner.setdefault(value.name, []).append(value)
    used_names, replaced_names = set(inner), []
    for name, origin in {**clashing_names(inner), **_names_of_copies(inner)}.items():
        old = next((candidate for candidate in (name, origin) if candidate not in signature_names), None)
        if old is None or old in replaced_names:
            continue
        new = f"{old}/1"
        while new in used_names:
            new += "_"
        used_names.add(new)
        replaced_names.append(old)
        for value in inner[old]:
            value.name = new
    return tuple(replaced_names)


def _names_of_copies(named: Mapping[str, Sequence[ir.Value]]) -> dict[str, str]:
    """Return tensor names that onnxruntime's quantizer may choose for copies of a bias, as name → name of the bias. The
    quantizer copies a bias that several layers share, and appends a number to its name. Names of initializers are left
    out.
    """
    shared_biases = {name for name, values in named.items() if sum(map(_layers_with_bias, values)) > 1}
    free = (name for name, values in named.items() if not any(value.is_initializer() for value in values))
    return {
        name: name[:end]
        for name in sorted(free)
        for end in range(len(name.rstrip("0123456789")), len(name))
        if name[:end] in shared_biases
    }


def _layers_with_bias(value: ir.Value) -> int:
    if not value.is_initializer():
        return 0
    return sum(place == operator_of(node).bias for node, place in value.uses())


def _find_free_name(stem: str, position: int, used_names: set[str]) -> str:
    name = f"{stem}_{position}"
    while name in used_names:
        name += "_"
    return name


def is_sorted(graph: onnx.GraphProto) -> bool:
    """Return whether the nodes are in topological order. A node must come after all nodes whose outputs are read by the
    node itself or by a graph inside it.
    """
    outputs = {o for node in graph.node for o in node.output if o}
    computed: set[str] = set()
    for node in graph.node:
        if any(name in outputs and name not in computed for name in names_read(node)):
            return False
        computed.update(node.output)
    return True


def sort_nodes(graph: onnx.GraphProto, path: Path) -> None:
    """Put the nodes of `graph` in topological order, in place, as close to the given order as possible.

    Raises:
        ModelError: nodes depend on each other in a cycle.
    """
    if is_sorted(graph):
        return
    maker = {o: i for i, node in enumerate(graph.node) for o in node.output if o}
    waiting = [{maker[n] for n in names_read(node) if n in maker} for node in graph.node]
    users: dict[int, list[int]] = {}
    for index, makers in enumerate(waiting):
        for m in makers:
            users.setdefault(m, []).append(index)
    ready = [i for i, makers in enumerate(waiting) if not makers]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for user in users.get(index, ()):
            waiting[user].discard(index)
            if not waiting[user]:
                heapq.heappush(ready, user)
    if len(order) < len(graph.node):
        stuck = graph.node[_on_cycle(waiting)]
        raise ModelError(
            f"{path}: node {stuck.name or stuck.op_type!r} depends on its own output, directly or through others",
            "The graph has a cycle and cannot run; export it again",
        )
    ordered = onnx.GraphProto()
    ordered.node.extend(graph.node[i] for i in order)
    del graph.node[:]
    graph.node.extend(ordered.node)


def _on_cycle(waiting: list[set[int]]) -> int:
    """Return the index of a node on a cycle. Each waiting node waits for another waiting node, so following them must
    reach one of them twice.
    """
    index = next(i for i, makers in enumerate(waiting) if makers)
    visited: set[int] = set()
    while index not in visited:
        visited.add(index)
        index = min(waiting[index])
    return index


def names_read(node: onnx.NodeProto) -> set[str]:
    """Return the names that a node reads: its inputs, and the names from outside that graphs inside it read."""
    names = {n for n in node.input if n}
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs] if attribute.HasField("g") else list(attribute.graphs):
            inside = {i.name for i in graph.input} | {t.name for t in graph.initializer}
            inside |= {o for n in graph.node for o in n.output}
            for inner in graph.node:
                names |= names_read(inner) - inside
            names |= {o.name for o in graph.output} - inside
    return names
