"""Write a .tflite file with the schema from the ai-edge-litert package.

The schema requires that the bytes of each constant start at a multiple of 16, because a microcontroller may read them
in place. The package's generated classes do not ensure this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from edgeq.backends.litert.dialect import dialect
from edgeq.backends.litert.network import Port, Scales, TfliteNetwork, TfliteOperator, TfliteTensor
from edgeq.errors import RuntimeUnavailableError

ALIGNMENT = 16
METADATA = "edgeq"
"""Name of the metadata entry that states in which order the file stores the axes of its inputs and outputs."""
# The old field for an operator's code has one byte. Newer operators have 127 there and their code in the new field.
_OLD_CODES = 127
# Options that the schema stores as numbers of an enumeration; operators here name them as text.
_ENUMS = {
    "padding": "Padding",
    "fusedActivationFunction": "ActivationFunctionType",
    "inDataType": "TensorType",
    "outDataType": "TensorType",
    "outputType": "TensorType",
    "mode": "MirrorPadMode",
}


def schema() -> Any:
    """Return the classes of the schema.

    Raises:
        RuntimeUnavailableError: the ai-edge-litert package is not installed.
    """
    try:
        from ai_edge_litert import schema_py_generated
    except ImportError as error:
        raise RuntimeUnavailableError(
            "ai-edge-litert is not installed", "Install it: pip install ai-edge-litert"
        ) from error
    return schema_py_generated


def write(network: TfliteNetwork, *, nodes: bool = False, metadata: Mapping[str, bytes] | None = None) -> bytes:
    """Return the bytes of a network's file. The same network always gives the same bytes.

    Args:
        nodes: whether the file names the ONNX node of each operator, so that profiles of the file are readable.
        metadata: further entries of the file's metadata, name → content.
    """
    return _FileWriter(network, nodes=nodes).pack(metadata or {})


class _FileWriter:
    def __init__(self, network: TfliteNetwork, *, nodes: bool) -> None:
        self._schema, self._network, self._nodes = schema(), network, nodes
        self._tensors = {tensor: place for place, tensor in enumerate(network.tensors())}
        # The format requires that buffer 0 is empty: it stands for "no constant".
        self._buffers: list[Any] = [self._buffer(b"")]
        self._codes: dict[tuple[str, int], int] = {}

    def pack(self, metadata: Mapping[str, bytes]) -> bytes:
        """Return the bytes of the file."""
        import flatbuffers

        s, network = self._schema, self._network
        graph = s.SubGraphT()
        graph.name = "main"
        graph.tensors = [self._tensor(tensor) for tensor in self._tensors]
        graph.operators = [self._operator(operator) for operator in network.operators]
        graph.inputs = [self._tensors[port.tensor] for port in network.inputs]
        graph.outputs = [self._tensors[port.tensor] for port in network.outputs]
        model = s.ModelT()
        model.version = 3
        model.description = "edgeq"
        model.subgraphs = [graph]
        model.metadata = [self._metadata(METADATA, self._describe()), *(self._metadata(*e) for e in metadata.items())]
        model.signatureDefs = [self._signature()]
        model.operatorCodes = [self._code(kind, version) for kind, version in self._codes]
        model.buffers = self._buffers
        builder = flatbuffers.Builder(1 << 16)
        # The identifier by which runtimes recognise the format.
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def _buffer(self, data: bytes) -> Any:
        buffer = self._schema.BufferT()
        if data:
            buffer.data = data
            # The generated class would align the bytes to 4 and not to 16.
            buffer.Pack = lambda builder: _packed(self._schema, builder, data)
        return buffer

    def _add(self, data: bytes) -> int:
        self._buffers.append(self._buffer(data))
        return len(self._buffers) - 1

    def _tensor(self, tensor: TfliteTensor) -> Any:
        entry = self._schema.TensorT()
        entry.name = tensor.name
        entry.shape = list(tensor.shape)
        # Without this flag, a tensor with an empty shape would have an unknown rank and not be a single number.
        entry.hasRank = True
        entry.type = getattr(self._schema.TensorType, tensor.type.upper())
        if tensor.values is not None:
            entry.buffer = self._add(np.ascontiguousarray(tensor.values).tobytes())
        if tensor.scales is not None:
            entry.quantization = self._quantization(tensor.scales)
        return entry

    def _quantization(self, scales: Scales) -> Any:
        parameters = self._schema.QuantizationParametersT()
        parameters.scale = [float(scale) for scale in scales.scale]
        parameters.zeroPoint = [int(zero) for zero in np.broadcast_to(scales.zero, scales.scale.shape)]
        parameters.quantizedDimension = scales.axis if scales.scale.size > 1 else 0
        return parameters

    def _operator(self, operator: TfliteOperator) -> Any:
        row, entry = dialect()[operator.kind], self._schema.OperatorT()
        entry.opcodeIndex = self._codes.setdefault((operator.kind, version(operator)), len(self._codes))
        # The format writes an optional input that is left out as -1.
        entry.inputs = [-1 if tensor is None else self._tensors[tensor] for tensor in operator.inputs]
        entry.outputs = [self._tensors[tensor] for tensor in operator.outputs]
        if row.options:
            entry.builtinOptionsType = getattr(self._schema.BuiltinOptions, row.options)
            entry.builtinOptions = getattr(self._schema, f"{row.options}T")()
            for name, value in operator.options.items():
                enum = getattr(self._schema, _ENUMS[name]) if name in _ENUMS else None
                setattr(entry.builtinOptions, name, value if enum is None else getattr(enum, value))
        return entry

    def _code(self, kind: str, version_: int) -> Any:
        code = self._schema.OperatorCodeT()
        code.builtinCode = getattr(self._schema.BuiltinOperator, kind)
        code.deprecatedBuiltinCode = min(code.builtinCode, _OLD_CODES)
        code.version = version_
        return code

    def _metadata(self, name: str, content: bytes) -> Any:
        metadata = self._schema.MetadataT()
        metadata.name, metadata.buffer = name, self._add(content)
        return metadata

    def _describe(self) -> bytes:
        network = self._network
        text: dict[str, Any] = {"inputs": _ports(network.inputs), "outputs": _ports(network.outputs)}
        if self._nodes:
            text["nodes"] = [operator.node for operator in network.operators]
        return json.dumps(text, sort_keys=True).encode()

    def _signature(self) -> Any:
        signature = self._schema.SignatureDefT()
        # The name under which applications look for the main signature.
        signature.signatureKey = "serving_default"
        signature.inputs, signature.outputs = (
            [self._named(port) for port in ports] for ports in (self._network.inputs, self._network.outputs)
        )
        return signature

    def _named(self, port: Port) -> Any:
        entry = self._schema.TensorMapT()
        entry.name, entry.tensorIndex = port.name, self._tensors[port.tensor]
        return entry


def version(operator: TfliteOperator) -> int:
    """Return the version number that a file states for an operator."""
    return dialect()[operator.kind].version(operator.type)


def _ports(ports: tuple[Port, ...]) -> list[dict[str, Any]]:
    return [_stated(port) for port in ports]


def _stated(port: Port) -> dict[str, Any]:
    record: dict[str, Any] = {"name": port.name, "order": list(port.order)}
    return record if port.shape is None else {**record, "type": port.type, "shape": list(port.shape)}


def _packed(schema_: Any, builder: Any, data: bytes) -> Any:
    """Pack a Buffer whose bytes start at a multiple of `ALIGNMENT`."""
    builder.StartVector(1, len(data), ALIGNMENT)
    # The bytes are copied at once. The generated code would append them one by one, which is slow for large models.
    builder.head = builder.Head() - len(data)
    builder.Bytes[builder.Head() : builder.Head() + len(data)] = data
    vector = builder.EndVector()
    schema_.BufferStart(builder)
    schema_.BufferAddData(builder, vector)
    return schema_.BufferEnd(builder)
