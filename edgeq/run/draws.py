"""Give the random operators of a model the same numbers in each session, so that two models can be compared.

onnxruntime draws other numbers in each session and in each run. A `seed` attribute does not help: it fixes only the
sequence of a session, so the numbers depend on the number of earlier runs, and on the platform's generator. Sessions
that measure therefore open a copy of the model. In the copy, a random operator reads its numbers from a table. Their
positions depend only on the name of the node, so they are the same before and after a change of the model.
"""

from __future__ import annotations

import mmap
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
)
"""Operators of ONNX that draw random numbers in each run. Dropout also does so in training mode."""
DROPOUT = "Dropout"

# Operator names as they are in the file, so that most files need not be parsed.
_NAMES = (b"Random", b"Bernoulli", b"Multinomial", b"Dropout")
_MAIN = ("", "ai.onnx")
_OLDEST = 13
"""Oldest opset in which the copy can be written. The prepared model has at least this opset."""
# Opsets that introduced CastLike, and the attribute `allowzero` of Reshape.
_CAST_LIKE, _ALLOW_ZERO = 15, 14
_TABLE = 65521
"""Length of the tables. It is prime, so that repetitions do not coincide with the sizes of channels."""
_PREFIX = "edgeq.draws"
_FLOAT, _INT32, _INT64 = 1, 6, 7
"""Element types, as numbers of TensorProto.DataType. They are not read from onnx, because importing it is slow."""
_START = f"{_PREFIX}.start"


def fix_draws(model: Path | bytes) -> bytes | None:
    """Return a copy of an ONNX model in which random operators read their numbers from tables.

    External data keep their relative locations.

    Returns:
        The copy, or None if the model has no random operators, or has an opset in which the copy cannot be written.
    """
    if isinstance(model, bytes):
        return _rewrite(model) if _mentions_random(model) else None
    state = model.stat()
    return _rewrite(model.read_bytes()) if _is_drawing(model, state.st_size, state.st_mtime_ns) else None


def write_fixed_draws(model: Path, folder: Path) -> Path:
    """Write the copy from `fix_draws` into `folder`, with the model's external data. Return the path of the copy,
    or `model` if there is none.
    """
    import onnx

    copy = fix_draws(model)
    if copy is None:
        return model
    path = folder / f"{zlib.crc32(copy):08x}-{model.name}"
    path.write_bytes(copy)
    for name in {t.value for t in _find_locations(onnx.load_model_from_string(copy))}:
        source, place = model.parent / name, folder / name
        # The file is untrusted, and may name data outside of its folder.
        inside = all(p.resolve().is_relative_to(f.resolve()) for p, f in ((source, model.parent), (place, folder)))
        if inside and source.is_file() and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, place)
            except OSError:  # another file system
                shutil.copyfile(source, place)
    return path


def find_random_names(model: Path) -> frozenset[str]:
    """Return the names of the random operators in an ONNX file. If another file has the same names, `fix_draws`
    gives both the same numbers. Return nothing if the file has no copy.
    """
    import onnx

    if fix_draws(model) is None:
        return frozenset()
    graph = onnx.load(model, load_external_data=False).graph
    return frozenset(_find_name(node) for node in _walk_nodes(graph.node) if _is_random(node))


def _find_name(node: onnx.NodeProto) -> str:
    return node.name or next(filter(None, node.output), "")


def _find_locations(model: onnx.ModelProto) -> Iterator[Any]:
    return (e for tensor in model.graph.initializer for e in tensor.external_data if e.key == "location")


@lru_cache(maxsize=64)
def _is_drawing(model: Path, size: int, changed_ns: int) -> bool:
    """Return whether a file has a copy. `changed_ns` is the time of the file's last change, so that a new file is
    read.
    """
    del changed_ns
    if not size:
        return False
    with model.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _mentions_random(content) and _rewrite(content[:]) is not None


def _mentions_random(content: bytes | mmap.mmap) -> bool:
    """Return whether a file may contain random operators. Searching for their names is faster than parsing the file."""
    return any(content.find(name) >= 0 for name in _NAMES)


def _rewrite(content: bytes) -> bytes | None:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_model_from_string(content)
    except DecodeError:  # onnxruntime names the problem when it opens the file
        return None
    # A function may be called many times, and each call needs numbers of its own.
    if any(_is_random(node) for function in model.functions for node in _walk_nodes(function.node)):
        from onnx.inliner import inline_local_functions

        model = inline_local_functions(model)
    opset = max((entry.version for entry in model.opset_import if entry.domain in _MAIN), default=0)
    if opset < _OLDEST or not any(map(_is_random, _walk_nodes(model.graph.node))):
        return None
    if opset < _CAST_LIKE:
        # Before CastLike, a cast needs the number of its type.
        model = onnx.shape_inference.infer_shapes(model)
    types = {v.name: v.type.tensor_type.elem_type for graph in _walk_graphs(model.graph) for v in _list_values(graph)}
    types.update((tensor.name, tensor.data_type) for tensor in model.graph.initializer)
    for graph in _walk_graphs(model.graph):
        nodes = list(graph.node)
        del graph.node[:]
        for node in nodes:
            # Rebuild the list, because each random node becomes several.
            graph.node.extend(_Draw(node, opset, types).build_nodes() if _is_random(node) else [node])
    # An input with a default is not a constant, so no optimiser folds the numbers into weights.
    model.graph.input.append(onnx.helper.make_tensor_value_info(_START, onnx.TensorProto.INT64, []))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(0, np.int64), _START))
    generator = np.random.default_rng(0)
    for name, values in (("uniform", generator.random(_TABLE)), ("normal", generator.standard_normal(_TABLE))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), f"{_PREFIX}.{name}"))
    return bytes(model.SerializeToString())


def _list_values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.output, *graph.value_info)


def _find_bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _walk_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for body in _find_bodies(node):
            yield from _walk_graphs(body)


def _walk_nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for body in _find_bodies(node):
            yield from _walk_nodes(body.node)


def _is_random(node: onnx.NodeProto) -> bool:
    if node.domain not in _MAIN:
        return False
    return node.op_type in RANDOM or (node.op_type == DROPOUT and len(node.input) > 2 and bool(node.input[2]))


class _Draw:
    """Make the nodes that replace one random operator.

    Args:
        node: the random operator.
        opset: opset of the model.
        types: tensor → element type, where it is known.
    """

    def __init__(self, node: onnx.NodeProto, opset: int, types: dict[str, int]) -> None:
        import onnx

        self._helper = onnx.helper
        self._node, self._opset, self._types = node, opset, types
        self._attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        self._output = next(filter(None, node.output))
        self._nodes: list[onnx.NodeProto] = []

    def build_nodes(self) -> list[onnx.NodeProto]:
        """Return the nodes, in execution order. The last ones have the outputs of the random operator."""
        kind = self._node.op_type
        if kind.startswith("Random"):
            self._build_random()
        elif kind == "Bernoulli":
            self._build_bernoulli()
        elif kind == "Multinomial":
            self._build_multinomial()
        else:
            self._build_dropout()
        return self._nodes

    def _build_random(self) -> None:
        normal, attributes = "Normal" in self._node.op_type, self._attributes
        offset, width = (
            (attributes.get("mean", 0.0), attributes.get("scale", 1.0))
            if normal
            else (attributes.get("low", 0.0), attributes.get("high", 1.0) - attributes.get("low", 0.0))
        )
        table = "normal" if normal else "uniform"
        if self._node.op_type.endswith("Like"):
            like = self._node.input[0]
            values = self._read_table(table, self._add_node("Size", like), self._add_node("Shape", like))
        else:
            like, shape = "", np.asarray(attributes["shape"], np.int64)
            values = self._read_table(
                table, self._add_constant(np.prod(shape, dtype=np.int64)), self._add_constant(shape)
            )
        values = self._add_node("Mul", values, self._add_constant(np.float32(width)))
        values = self._add_node("Add", values, self._add_constant(np.float32(offset)))
        self._cast(values, like, self._output)

    def _build_bernoulli(self) -> None:
        likely = self._node.input[0]
        drawn = self._read_table("uniform", self._add_node("Size", likely), self._add_node("Shape", likely))
        self._cast(self._add_node("Less", drawn, self._to_float(likely)), likely, self._output)

    def _build_multinomial(self) -> None:
        scores, count = self._to_float(self._node.input[0]), int(self._attributes.get("sample_size", 1))
        rows = self._add_node("Slice", self._add_node("Shape", scores), *map(self._add_constant, _to_int64([0], [1])))
        shape = self._add_node("Concat", rows, *map(self._add_constant, _to_int64([count], [1])), axis=0)
        size = self._add_node("Mul", self._add_node("Squeeze", rows), *map(self._add_constant, _to_int64(count)))
        drawn = self._read_table("uniform", size, shape)
        class_axis, middle_axis, zero = map(self._add_constant, _to_int64([2], [1], 0))
        shares = self._add_node(
            "CumSum", self._add_node("Softmax", scores, axis=1), *map(self._add_constant, _to_int64(1))
        )
        # The class is the number of running sums that the drawn number has passed.
        below = self._add_node("Less", self._add_node("Unsqueeze", shares, middle_axis), drawn)
        passed = self._add_node("ReduceSum", self._add_node("Cast", below, to=_INT64), class_axis, keepdims=0)
        # Rounding may leave the last sum of the shares below 1.
        classes = self._add_node(
            "Slice", self._add_node("Shape", scores), *map(self._add_constant, _to_int64([1], [2]))
        )
        largest = self._add_node("Sub", self._add_node("Squeeze", classes), *map(self._add_constant, _to_int64(1)))
        clipped = self._add_node("Max", self._add_node("Min", passed, largest), zero)
        to = self._attributes.get("dtype", _INT32)
        self._add_node("Cast", clipped, to=to, output=self._output)

    def _build_dropout(self) -> None:
        data, ratio, training = list(self._node.input)[:3]
        share = self._to_float(ratio) if ratio else self._add_constant(np.float32(0.5))
        drawn = self._read_table("uniform", self._add_node("Size", data), self._add_node("Shape", data))
        is_kept = self._add_node("Or", self._add_node("GreaterOrEqual", drawn, share), self._add_node("Not", training))
        unit = self._add_constant(np.float32(1.0))
        # What is kept is raised, so that the expected sum stays the same.
        raised = self._add_node("Div", unit, self._add_node("Sub", unit, share))
        factor = self._add_node("Where", training, raised, unit)
        factor = self._add_node("Where", is_kept, factor, self._add_constant(np.float32(0.0)))
        if self._node.output[0]:
            self._add_node("Mul", data, self._cast(factor, data), output=self._node.output[0])
        if len(self._node.output) > 1 and self._node.output[1]:
            self._add_node("Identity", is_kept, output=self._node.output[1])

    def _read_table(self, table: str, size: str, shape: str) -> str:
        """Return the numbers of this operator: float32 values of `shape`, which has `size` elements."""
        # In onnxruntime, operators with the same seed draw the same numbers.
        key = str(self._attributes.get("seed", _find_name(self._node)))
        # crc32 spreads the names, and is the same in every process, unlike hash().
        start = self._add_node("Add", _START, *map(self._add_constant, _to_int64(zlib.crc32(key.encode()))))
        places = self._add_node(
            "Range", *map(self._add_constant, _to_int64(0)), size, *map(self._add_constant, _to_int64(1))
        )
        places = self._add_node(
            "Mod", self._add_node("Add", places, start), *map(self._add_constant, _to_int64(_TABLE))
        )
        values = self._add_node("Gather", f"{_PREFIX}.{table}", places)
        zeros: dict[str, Any] = {"allowzero": 1} if self._opset >= _ALLOW_ZERO else {}
        return self._add_node("Reshape", values, shape, **zeros)

    def _to_float(self, value: str) -> str:
        return self._add_node("Cast", value, to=_FLOAT)

    def _cast(self, value: str, like: str, output: str = "") -> str:
        """Convert to the operator's type: that of its attribute, or that of the tensor `like`."""
        to = self._attributes.get("dtype", 0)
        if not to and like and self._opset >= _CAST_LIKE:
            return self._add_node("CastLike", value, like, output=output)
        return self._add_node("Cast", value, to=to or self._types.get(like, 0) or _FLOAT, output=output)

    def _add_constant(self, value: Any) -> str:
        import onnx

        return self._add_node("Constant", value=onnx.numpy_helper.from_array(np.asarray(value)))

    def _add_node(self, op_type: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output. "" makes a name."""
        name = output or f"{_PREFIX}.{self._output}.{len(self._nodes)}"
        self._nodes.append(self._helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name


def _to_int64(*values: Any) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    return [np.asarray(value, np.int64) for value in values]
