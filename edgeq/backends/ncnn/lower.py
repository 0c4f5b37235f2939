"""Lower an ONNX model, float or with Q/DQ pairs, to the layers of ncnn.

A pair of QuantizeLinear and DequantizeLinear makes no layer. It states the scale with which an int8 layer rounds its
input. ncnn computes everything between int8 layers in float, so other readers of the pair read the tensor before it.

Each ONNX operator has a function in `operators`. The elements of a blob have the order of the model's tensor, but the
blob may have other axes of size 1, or merged axes. So operators that only change the shape make no layer, and a layer
that needs certain axes gets them from a Reshape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.ncnn.dialect import dialect
from edgeq.backends.ncnn.network import Blob, BlobPort, LayerScales, NcnnNetwork, ParamLayer, Setting
from edgeq.backends.refusals import find_refusals
from edgeq.errors import ModelError
from edgeq.model.graph import constant, is_constant, is_op, name_of, only_reader, sizes
from edgeq.model.quant_params import QuantParams, params_of

# ncnn reads names with a limit of 255 bytes; the rest of the room is for suffixes.
_LONGEST_NAME = 200
_NAME_MARKS = "_./:-"


class NotInNcnnError(Exception):
    """Report a node that ncnn's files cannot express. The message states only the reason."""


Handler = Callable[["NcnnLowering", ir.Node], None]


def dims_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the blob for a tensor: those of the tensor, without a first axis of size 1, the batch."""
    dims = tuple(shape[1:]) if len(shape) > 1 and shape[0] == 1 else tuple(shape)
    # ncnn has no scalars.
    return dims or (1,)


class NcnnLowering:
    """Hold the state of one lowering: the layers so far, and the blob of each model tensor that has one."""

    def __init__(self, model: ir.Model, handlers: Mapping[str, Handler]) -> None:
        self._graph, self._handlers = model.graph, handlers
        self._layers: list[ParamLayer] = []
        self._blobs: dict[str, Blob] = {}
        self._shaped: dict[tuple[Blob, tuple[int, ...]], Blob] = {}
        # The quantization of each tensor that a pair rounds, by the name of the pair's output.
        self._rounded: dict[str, QuantParams] = {}
        self._names: set[str] = set()
        self._done: set[ir.Node] = set()
        self._node: ir.Node | None = None

    def run(self, source: object) -> NcnnNetwork:
        """Lower the whole model.

        Raises:
            ModelError: a node cannot be lowered; the message names the node, its operator and the reason.
        """
        inputs = tuple(self._input(value) for value in self._graph.inputs if not value.is_initializer())
        for node, reason in self._refused_nodes():
            raise ModelError(
                f"{source}: node {node.name!r} ({node.op_type}) cannot be written for ncnn: {reason}",
                "Export the model without it; `edgeq inspect MODEL -t TARGET` lists all such nodes",
            )
        outputs = tuple(self._port(value, self.blob(value)) for value in self._graph.outputs)
        return NcnnNetwork(inputs, outputs, tuple(self._layers)).without_unused()

    def refusals(self) -> dict[str, str]:
        """Return the reason for each node that cannot be lowered, by name.

        Raises:
            ModelError: an input cannot be lowered.
        """
        for value in self._graph.inputs:
            if not value.is_initializer():
                self._input(value)
        return {str(node.name): reason for node, reason in self._refused_nodes()}

    def _refused_nodes(self) -> Iterator[tuple[ir.Node, str]]:
        """Lower all nodes, and yield each node that cannot be lowered, with the reason. See `find_refusals`."""

        def lower(node: ir.Node) -> None:
            """Lower one node, unless it was lowered with another."""
            if node not in self._done:
                self._node = node
                self._lower(node)

        def substitute(value: ir.Value, shape: Sequence[int]) -> None:
            """Make a blob that stands for an output of a refused node."""
            self._blobs[name_of(value)] = self._fresh(name_of(value), dims_of(shape))

        return find_refusals(self._graph, lower, NotInNcnnError, substitute)

    def _input(self, value: ir.Value) -> BlobPort:
        shape = sizes(value)
        if shape is None:
            raise ModelError(f"input {value.name!r} has no fixed sizes", "Fix them with ⟨fix⟩ NAME=SIZE")
        if value.dtype != ir.DataType.FLOAT:
            raise ModelError(f"input {value.name!r} is of type {value.dtype}", "Export the model with a float32 input")
        blob = self._fresh(name_of(value), dims_of(shape))
        self._check_axes(blob.dims)
        # ncnn counts from the innermost size.
        self._layers.append(ParamLayer("Input", blob.name, (), (blob,), _sizes_settings(blob.dims)))
        self._blobs[name_of(value)] = blob
        return self._port(value, blob)

    def _port(self, value: ir.Value, blob: Blob) -> BlobPort:
        shape = tuple(size if isinstance(size, int) else size.value for size in value.shape or ())
        return BlobPort(name_of(value), blob, shape)

    def _lower(self, node: ir.Node) -> None:
        if is_op(node, "QuantizeLinear"):
            self._blobs[name_of(node.outputs[0])] = self.blob(node.inputs[0])
        elif is_op(node, "DequantizeLinear"):
            # A constant's integers are read by `integers` when a layer needs them.
            if not is_constant(node.inputs[0]):
                self._dequantize(node)
        elif not is_op(node, "Constant"):
            handler = self._handlers.get(node.op_type) if is_op(node, node.op_type) else None
            if handler is None:
                raise NotInNcnnError("edgeq does not write this operator")
            handler(self, node)

    def _dequantize(self, node: ir.Node) -> None:
        name = name_of(node.outputs[0])
        params = params_of(node)
        if params is None:
            raise NotInNcnnError("its scale is computed")
        self._blobs[name] = self.blob(node.inputs[0])
        self._rounded[name] = params

    # Methods that the operators' functions call.

    def is_constant(self, value: ir.Value | None) -> bool:
        """Return whether a value is a constant, or the dequantized form of constant integers."""
        return is_constant(value) or (
            value is not None
            and is_op(value.producer(), "DequantizeLinear")
            and is_constant(value.producer().inputs[0])  # type: ignore[union-attr]
        )

    def integers(self, value: ir.Value | None) -> tuple[NDArray[Any], QuantParams] | None:
        """Return the integers of a dequantized constant and their parameters, or None for other values."""
        node = value.producer() if value is not None else None
        if node is None or not is_op(node, "DequantizeLinear") or not is_constant(node.inputs[0]):
            return None
        values, params = constant(node.inputs[0]), params_of(node)
        if values is None or params is None:
            raise NotInNcnnError("its scale is computed")
        return values, params

    def floats(self, value: ir.Value | None) -> NDArray[np.float32]:
        """Return the values of a constant as float32."""
        stored = self.integers(value)
        if stored is not None:
            values, params = stored
            return np.asarray(params.dequantize(values), np.float32)
        values_ = constant(value)
        if values_ is None:
            raise NotInNcnnError(f"{name_of(value)!r} is computed, not constant")
        return np.asarray(values_, np.float32)

    def numbers(self, value: ir.Value | None) -> list[int]:
        """Return the elements of a constant of integers, such as axes."""
        values = constant(value)
        if values is None:
            raise NotInNcnnError(f"{name_of(value)!r} is computed, not constant")
        return [int(number) for number in values.ravel()]

    def input_params(self, value: ir.Value | None) -> QuantParams | None:
        """Return how a pair rounds a tensor, or None if no pair does."""
        return self._rounded.get(name_of(value))

    def shape(self, value: ir.Value | None) -> tuple[int, ...]:
        """Return the shape of a tensor in the model."""
        shape = sizes(value)
        if shape is None:
            raise NotInNcnnError(f"the shape of {name_of(value)!r} is not known")
        return shape

    def blob(self, value: ir.Value | None) -> Blob:
        """Return the blob of a tensor, whatever its axes are. A constant becomes a layer."""
        blob = self._blobs.get(name_of(value))
        if blob is not None:
            return blob
        if value is None or not self.is_constant(value):
            raise NotInNcnnError(f"it reads {name_of(value)!r}, which no node makes")
        values = self.floats(value)
        blob = self.emit(
            "MemoryData", (), dims_of(values.shape), _sizes_settings(dims_of(values.shape)), vectors=(values,)
        )
        self._blobs[name_of(value)] = blob
        return blob

    def image(self, value: ir.Value | None) -> Blob:
        """Return a blob with the axes of the tensor itself, without the batch."""
        return self.shaped(self.blob(value), dims_of(self.shape(value)))

    def axis(self, value: ir.Value | None, axis: int) -> int:
        """Return the blob's number for an axis of a tensor. See `image`."""
        shape = self.shape(value)
        dropped = len(shape) - len(dims_of(shape)) if shape else 0
        place = axis % max(len(shape), 1) - dropped
        if place < 0:
            raise NotInNcnnError("it works along the batch")
        return place

    def shaped(self, blob: Blob, dims: Sequence[int]) -> Blob:
        """Return a blob with the same elements and the sizes `dims`."""
        dims = tuple(int(size) for size in dims)
        if blob.dims == dims:
            return blob
        if (blob, dims) not in self._shaped:
            self._shaped[blob, dims] = self.emit("Reshape", (blob,), dims, _sizes_settings(dims))
        return self._shaped[blob, dims]

    def emit(
        self,
        kind: str,
        inputs: Sequence[Blob],
        dims: Sequence[int],
        settings: Mapping[int, Setting] | None = None,
        *,
        weights: Sequence[NDArray[Any]] = (),
        vectors: Sequence[NDArray[np.float32]] = (),
        scales: LayerScales | None = None,
    ) -> Blob:
        """Write one layer with one output, and return the output."""
        return self.emit_many(kind, inputs, (dims,), settings, weights=weights, vectors=vectors, scales=scales)[0]

    def emit_many(
        self,
        kind: str,
        inputs: Sequence[Blob],
        dims: Sequence[Sequence[int]],
        settings: Mapping[int, Setting] | None = None,
        *,
        weights: Sequence[NDArray[Any]] = (),
        vectors: Sequence[NDArray[np.float32]] = (),
        interleaved: Sequence[tuple[NDArray[Any], bool]] = (),
        scales: LayerScales | None = None,
    ) -> tuple[Blob, ...]:
        """Write one layer, and return its outputs, one for each of `dims`."""
        node = self._node
        stem = name_of(node.outputs[0]) if node is not None and node.outputs else kind
        blobs = tuple(self._fresh(stem, tuple(int(size) for size in sizes_)) for sizes_ in dims)
        for blob in blobs:
            self._check_axes(blob.dims)
        self._layers.append(
            ParamLayer(
                kind,
                blobs[0].name,
                tuple(inputs),
                blobs,
                dict(settings or {}),
                tuple(weights),
                tuple(np.ascontiguousarray(vector, np.float32) for vector in vectors),
                tuple(interleaved),
                scales,
                str(node.name) if node is not None else "",
            )
        )
        return blobs

    def hold(self, value: ir.Value, blob: Blob) -> None:
        """Record the blob of a tensor of the model."""
        if blob.size != prod(self.shape(value)):
            raise NotInNcnnError(f"{name_of(value)!r} has {self.shape(value)} elements, but its blob {blob.dims}")
        self._blobs[name_of(value)] = blob

    def sole_reader(self, value: ir.Value) -> ir.Node | None:
        """Return the only node that reads a tensor, or None if others read it too or if it is an output."""
        return only_reader(value)

    def merge(self, node: ir.Node) -> ir.Value:
        """Record that a layer already computes `node`, and return the node's output."""
        self._done.add(node)
        return node.outputs[0]

    def _check_axes(self, dims: Sequence[int]) -> None:
        if len(dims) > dialect().most_axes:
            raise NotInNcnnError(f"a tensor has {len(dims)} axes without the batch; ncnn has {dialect().most_axes}")
        if not all(dims):
            raise NotInNcnnError("a tensor has no elements")

    def _fresh(self, name: str, dims: tuple[int, ...]) -> Blob:
        # The text separates names by spaces.
        stem = "".join(c if (c.isascii() and c.isalnum()) or c in _NAME_MARKS else "_" for c in name)[:_LONGEST_NAME]
        free, count = stem or "blob", 1
        while free in self._names:
            count += 1
            free = f"{stem}/{count}"
        self._names.add(free)
        return Blob(free, dims)


def _sizes_settings(dims: Sequence[int]) -> dict[int, Setting]:
    """Return the parameters for sizes that Input, MemoryData and Reshape share."""
    *outer, w = dims
    keys = ((0,), (0, 1), (0, 1, 2), (0, 1, 11, 2))[len(outer)] if len(outer) < 4 else ()
    return dict(zip(keys, (w, *reversed(outer)), strict=False))
