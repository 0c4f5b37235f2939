"""Open sessions of models in memory. Each model is converted to protobuf once, and parts of it are opened as
protobufs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.convert import external_folder, to_proto
from edgeq.model.graph import GraphIndex, name_of
from edgeq.model.order import names_read
from edgeq.model.skeleton import without_initializers
from edgeq.model.tensors import is_external, iter_tensors, tensor_bytes
from edgeq.run.session import SessionSettings, open_session

# Types of weights that ONNX Runtime accepts from outside of the model.
_HANDED_OVER = frozenset(getattr(onnx.TensorProto, name) for name in ("FLOAT", "FLOAT16", "DOUBLE", "INT8", "UINT8"))
# Smallest size in bytes of a weight that is passed to the session separately. Smaller weights, and integers that may be
# a shape or axes, stay in the graph for shape inference and constant folding.
_MIN_BYTES = 1 << 12
# Without this option, a model from memory cannot refer to data files.
_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class Loadable:
    """Hold a model in a form that sessions can open.

    Attributes:
        proto: the model, with references in place of large weights; it must not be changed.
        weights: values of the referenced weights that are in memory, by name.
        folder: folder of the referenced weights that are in files; None if there are none.
    """

    proto: onnx.ModelProto
    weights: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def of_proto(cls, model: onnx.ModelProto, folder: Path) -> Loadable:
        """Convert a protobuf. `folder` contains its external data, if it has any."""
        # Without external data, the session needs no option for its folder.
        is_whole = not any(map(is_external, iter_tensors(model)))
        proto = without_initializers(model)
        weights: dict[str, NDArray[Any]] = {}
        for tensor in model.graph.initializer:
            entry = proto.graph.initializer.add()
            if is_external(tensor) or tensor.data_type not in _HANDED_OVER or tensor_bytes(tensor) < _MIN_BYTES:
                entry.CopyFrom(tensor)
                continue
            weights[tensor.name] = np.ascontiguousarray(onnx.numpy_helper.to_array(tensor))
            _refer(entry, tensor.name, tensor.data_type, tensor.dims)
        return cls(proto, weights, None if is_whole else folder)

    @classmethod
    def of(cls, model: ir.Model | GraphIndex | Loadable) -> Loadable:
        """Convert a model without changing it. An index stores the result for later calls, and its file is used if it
        has one.
        """
        if isinstance(model, Loadable):
            return model
        if isinstance(model, GraphIndex):
            return model.once("what sessions open", lambda: cls._of_graph(model))
        return cls._of_model(model)

    @classmethod
    def _of_graph(cls, graph: GraphIndex) -> Loadable:
        if graph.path is None:
            return cls._of_model(graph.model)
        return cls.of_proto(onnx.load(graph.path, load_external_data=False), graph.path.parent)

    @classmethod
    def _of_model(cls, model: ir.Model) -> Loadable:
        """Convert a model without copying its large weights."""
        weights: dict[str, NDArray[Any]] = {}
        bare = model
        large = [(v, t) for v in model.graph.initializers.values() if (t := v.const_value) is not None and _is_large(t)]
        # The clone shares all weights, so it costs little, and the caller's model keeps its values.
        if large:
            bare = model.clone()
        for value, tensor in large:
            name = name_of(value)
            weights[name] = np.ascontiguousarray(tensor.numpy())
            bare.graph.initializers[name].const_value = ir.ExternalTensor(
                "weights", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(weights[name].shape), name=name
            )
        return cls(to_proto(bare), weights, external_folder(model))

    def with_outputs(self, names: Iterable[str]) -> Loadable:
        """Return a model that also outputs the tensors `names`, after its own outputs. The types of these outputs stay
        unknown if the model does not state them; the runtime infers them.
        """
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        present = {value.name for value in proto.graph.output}
        info_of = _infos(proto.graph)
        proto.graph.output.extend(info_of(name) for name in dict.fromkeys(names) if name not in present)
        return replace(self, proto=proto)

    def only(self, names: Iterable[str], *, inputs: Collection[str] | None = None) -> Loadable:
        """Return a model that outputs only `names`. It contains only the nodes and constants that these outputs need.

        Args:
            inputs: graph inputs to keep even if no node reads them; None keeps all.
        """
        outputs = list(dict.fromkeys(names))
        graph, required, nodes = self.proto.graph, set(outputs), []
        # Nodes are sorted, so one walk back from the outputs finds all that are needed.
        for node in reversed(graph.node):
            if required.intersection(node.output):
                nodes.append(node)
                required |= names_read(node)
        info_of = _infos(graph)
        part = onnx.GraphProto(
            name=graph.name,
            node=reversed(nodes),
            input=[value for value in graph.input if inputs is None or value.name in inputs or value.name in required],
            output=map(info_of, outputs),
            initializer=[tensor for tensor in graph.initializer if tensor.name in required],
            value_info=[value for value in graph.value_info if value.name in required and value.name not in outputs],
        )
        proto = onnx.ModelProto(
            ir_version=self.proto.ir_version,
            opset_import=self.proto.opset_import,
            graph=part,
            functions=self.proto.functions,
        )
        return replace(self, proto=proto, weights={n: v for n, v in self.weights.items() if n in required})

    def open(self, settings: SessionSettings | None = None) -> Any:
        """Open an `onnxruntime.InferenceSession`.

        Raises:
            RuntimeUnavailableError: onnxruntime is missing, or refuses the model or the settings.
        """
        settings = settings or SessionSettings()
        if self.folder is not None:
            settings = replace(settings, config={**settings.config, _FOLDER: str(self.folder.absolute())})
        return open_session(self.proto.SerializeToString(), settings, weights=self.weights)


def open_in_memory(model: ir.Model, settings: SessionSettings | None = None) -> Any:
    """Open an `onnxruntime.InferenceSession` for a model in memory. External data is read from the model's data files.

    Args:
        model: the model, which is not changed.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or refuses the model or the settings.
    """
    return Loadable.of(model).open(settings)


def _is_large(tensor: ir.TensorProtocol) -> bool:
    handed_over = int(tensor.dtype) in _HANDED_OVER and tensor.nbytes >= _MIN_BYTES
    return handed_over and not isinstance(tensor, ir.ExternalTensor)


def _refer(tensor: onnx.TensorProto, name: str, data_type: int, dims: Iterable[int]) -> None:
    """Turn a tensor into a reference to values that are passed to the session."""
    tensor.name, tensor.data_type, tensor.data_location = name, data_type, onnx.TensorProto.EXTERNAL
    tensor.dims.extend(dims)
    tensor.external_data.add(key="location", value="weights")


def _infos(graph: onnx.GraphProto) -> Any:
    """Return a function from a tensor's name to its description."""
    infos = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    return lambda name: infos.get(name) or onnx.ValueInfoProto(name=name)
