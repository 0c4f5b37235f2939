"""Open .tflite files in LiteRT, which uses XNNPACK's kernels on the CPU.

A session has the part of the interface of `onnxruntime.InferenceSession` that edgeq uses. If edgeq made the file, its
metadata describe the inputs and outputs of the original model, and the session presents those. For other files the
session presents the tensors of the file.
"""

from __future__ import annotations

import json
import struct
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.engines.catalog import EngineSpec
from edgeq_device.errors import BundleError, RuntimeUnavailableError
from edgeq_device.model.tensors import DTYPES, TensorInfo
from edgeq_device.system.files import read_file
from edgeq_device.system.plainjson import parse_json

SIGNATURE = "edgeq"
"""Name of the metadata entry that describes the model's inputs and outputs."""
MOST_BYTES = 1 << 20
# The FlatBuffer's file identifier.
_IDENTIFIER = b"TFL3"
_TYPES = {dtype: name for name, dtype in DTYPES.items()}
# The metadata are untrusted; these limits bound the work that they can cause.
_MOST_AXES = 64
_MOST_ENTRIES = 64


def open_model(
    ort: Any, engine: EngineSpec, model: Any, options: Any, engine_settings: Mapping[str, str]
) -> LiteRtSession:
    """Open the model at the path `model`; see `edgeq_device.engines.catalog.open_engine`.

    Raises:
        RuntimeUnavailableError: the file is not a .tflite file.
        BundleError: the metadata do not have edgeq's form.
        Exception: any error that LiteRT raises for the model.
    """
    del ort
    if not isinstance(model, str) or not model.endswith(engine.suffix):
        raise RuntimeUnavailableError(f"{engine.name} opens only {engine.suffix} files", "Convert the model")
    content = read_file(Path(model))
    if content[4:8] != _IDENTIFIER:
        raise RuntimeUnavailableError(
            f"{model} is not a {engine.suffix} file: it does not have the format's identifier"
        )
    stated = read_signature(content, model)
    runtime = import_module(f"{engine.module}.interpreter")
    threads = int(engine_settings["num_threads"]) if "num_threads" in engine_settings else None
    interpreter = runtime.Interpreter(model_content=content, num_threads=threads)
    interpreter.allocate_tensors()
    profile = options.profile_file_prefix if options.enable_profiling else ""
    return LiteRtSession(interpreter, stated, engine.provider, profile)


def read_signature(content: bytes, context: str) -> Dict[str, Any]:
    """Return the description of the model's inputs and outputs in a .tflite file's metadata, or {} if there is no
    description.

    Raises:
        BundleError: an offset leads out of the file, or the entry is too large or is not JSON.
    """
    try:
        entry = _FlatTable.root(content).metadata(SIGNATURE)
    except (struct.error, IndexError, ValueError) as error:
        raise BundleError(f"{context} is damaged: an offset of its metadata leads out of the file") from error
    if entry is None:
        return {}
    if len(entry) > MOST_BYTES:
        raise BundleError(f"{context}: {SIGNATURE} in its metadata is larger than {MOST_BYTES} bytes")
    return parse_json(entry, f"{context}: {SIGNATURE} in its metadata")


class _FlatTable:
    """Read a table of a FlatBuffer. Fields have numbers. Their positions are offsets from the table's start."""

    # Field numbers in LiteRT's schema.
    _MODEL_BUFFERS, _MODEL_METADATA = 4, 6
    _NAME, _BUFFER, _DATA = 0, 1, 0

    def __init__(self, content: bytes, place: int) -> None:
        self._content, self._place = content, place

    @classmethod
    def root(cls, content: bytes) -> _FlatTable:
        return cls(content, struct.unpack_from("<I", content, 0)[0])

    def metadata(self, name: str) -> Optional[bytes]:
        """Return the buffer of the entry `name` in a model's metadata, or None if there is no such entry."""
        for place in range(min(self._vector(self._MODEL_METADATA, 4)[1], _MOST_ENTRIES)):
            entry = self._table(self._MODEL_METADATA, place)
            if entry._bytes(self._NAME) == name.encode():
                field = entry._field(self._BUFFER)
                return self._table(self._MODEL_BUFFERS, self._number(field) if field else 0)._bytes(self._DATA)
        return None

    def _number(self, place: int) -> int:
        number: int = struct.unpack_from("<I", self._content, place)[0]
        return number

    def _field(self, number: int) -> int:
        """Return the position of a field, or 0 if the table does not have it."""
        # A table begins with the distance back to its vtable, which has the offsets of its fields.
        layout = self._place - struct.unpack_from("<i", self._content, self._place)[0]
        if layout < 0:
            raise ValueError(layout)
        # Two sizes of two bytes come before the offsets.
        slot = 4 + 2 * number
        if slot + 2 > struct.unpack_from("<H", self._content, layout)[0]:
            return 0
        offset: int = struct.unpack_from("<H", self._content, layout + slot)[0]
        return self._place + offset if offset else 0

    def _vector(self, number: int, size: int) -> Tuple[int, int]:
        """Return the position and the length of a vector whose elements have `size` bytes. Return (0, 0) if the vector
        is absent.
        """
        field = self._field(number)
        if not field:
            return 0, 0
        place = field + self._number(field)
        length = self._number(place)
        # A damaged length must not lead out of the file.
        if place + 4 + length * size > len(self._content):
            raise ValueError(length)
        return place + 4, length

    def _bytes(self, number: int) -> bytes:
        place, length = self._vector(number, 1)
        return self._content[place : place + length]

    def _table(self, number: int, index: int) -> _FlatTable:
        place, length = self._vector(number, 4)
        if index >= length:
            raise IndexError(index)
        at = place + 4 * index
        return _FlatTable(self._content, at + self._number(at))


class _Port:
    """Convert between an input or output of the model and its tensor in the file.

    Args:
        detail: the interpreter's description of the tensor.
        stated: description of the input or output in the file's metadata. "name" is always present, "type" and "shape"
            only if they differ from the tensor's. "order" lists, for each axis of the tensor, the number of the same
            axis in the model. If `stated` is empty, the input or output is the tensor itself.
    """

    def __init__(self, detail: Mapping[str, Any], stated: Mapping[str, Any], provider: str, context: str) -> None:
        self.index: int = detail["index"]
        self.dtype = np.dtype(detail["dtype"])
        if self.dtype.name not in _TYPES:
            raise RuntimeUnavailableError(f"{provider} does not support {self.dtype.name}")
        shape = [int(size) for size in detail["shape"]]
        self.axes = _parse_axes(stated, len(shape), context)
        self.in_place = self.axes == tuple(range(len(shape)))
        # argsort inverts a permutation.
        self.inverse_axes = tuple(int(axis) for axis in np.argsort(self.axes))
        self.fixed = tuple(shape[axis] for axis in self.inverse_axes)
        scale, self.zero_point = detail["quantization"]
        self.scale = np.float32(scale)
        numbers = _TYPES["float32"] if stated and scale and self.dtype.kind in "iu" else _TYPES[self.dtype.name]
        name, kind = stated.get("name", detail["name"]), stated.get("type", numbers)
        sizes = stated.get("shape", list(self.fixed))
        if not isinstance(name, str) or not isinstance(kind, str) or kind not in DTYPES or not _fits(sizes, self.fixed):
            raise BundleError(f"{context}: name, type or shape does not match the tensor {detail['name']!r}")
        self.info = TensorInfo(name, kind, sizes)
        self.model_dtype = np.dtype(DTYPES[kind])
        integers = self.dtype.kind in "iu"
        self.scaled = bool(scale) and integers and self.model_dtype.kind == "f"
        if self.model_dtype != self.dtype and not self.scaled and not (integers and self.model_dtype.kind in "iu"):
            raise BundleError(f"{context}: {self.dtype.name} cannot be converted to {self.model_dtype.name}")

    @property
    def batched(self) -> bool:
        """Return whether the model accepts any number of samples, although the file's tensor has room for only one."""
        return bool(self.fixed) and self.fixed[0] == 1 and not isinstance(self.info.shape[0], int)

    def encode(self, array: Any) -> Any:
        """Convert an array of the model to the file's tensor."""
        if self.scaled:
            limits = np.iinfo(self.dtype)
            # Values beyond the range saturate; a cast alone would wrap them around.
            array = np.clip(np.rint(array / self.scale) + self.zero_point, limits.min, limits.max)
        array = array.astype(self.dtype, copy=False)
        return array if self.in_place else np.ascontiguousarray(array.transpose(self.axes))

    def decode(self, array: Any) -> Any:
        """Convert a tensor of the file to the model's array."""
        array = array if self.in_place else np.ascontiguousarray(array.transpose(self.inverse_axes))
        if self.scaled:
            array = (array.astype(np.float32) - self.zero_point) * self.scale
        return array.astype(self.model_dtype, copy=False)

    def check(self, feed: Mapping[str, Any]) -> Any:
        """Return the array of this input in `feed`.

        Raises:
            ValueError: the array is missing, or its type or shape is wrong.
        """
        if self.info.name not in feed:
            raise ValueError(f"input {self.info.name!r} is missing")
        array = np.asarray(feed[self.info.name], order="C")
        open_axis = 1 if self.batched else 0
        fits = len(array.shape) == len(self.fixed) and array.shape[open_axis:] == self.fixed[open_axis:]
        if array.dtype != self.model_dtype or not fits:
            actual, expected = f"{array.dtype} {list(array.shape)}", f"{self.model_dtype} {self.info.shape}"
            raise ValueError(f"input {self.info.name!r} is {actual}, the model takes {expected}")
        return array


def _parse_axes(stated: Mapping[str, Any], rank: int, context: str) -> Tuple[int, ...]:
    axes = stated.get("order", list(range(rank)))
    if not isinstance(axes, list) or sorted(map(str, axes)) != sorted(map(str, range(rank))) or rank > _MOST_AXES:
        raise BundleError(f"{context}: its order does not list the tensor's {rank} axes")
    return tuple(int(axis) for axis in axes)


def _fits(sizes: Any, fixed: Sequence[int]) -> bool:
    """Return whether `sizes` match those of the tensor. Some of `sizes` may be open and match any number."""
    if not isinstance(sizes, list) or len(sizes) != len(fixed):
        return False
    return all(size is None or isinstance(size, str) or size == length for size, length in zip(sizes, fixed))


class LiteRtSession:
    """Run a model in LiteRT's interpreter.

    Args:
        stated: description of the model's inputs and outputs from the file's metadata.
        profile: path prefix of the file that `end_profiling` writes; "" if nothing is profiled.
    """

    def __init__(self, interpreter: Any, stated: Mapping[str, Any], provider: str, profile: str) -> None:
        self._interpreter, self._provider, self._profile = interpreter, provider, profile
        self._inputs, self._outputs = (
            _build_ports(details, stated.get(key), provider, key)
            for key, details in (
                ("inputs", interpreter.get_input_details()),
                ("outputs", interpreter.get_output_details()),
            )
        )
        self._places = {port.info.name: place for place, port in enumerate(self._outputs)}
        nodes = stated.get("nodes", [])
        self._nodes = {place: name for place, name in enumerate(nodes if isinstance(nodes, list) else []) if name}
        self._one_by_one = all(port.batched for port in (*self._inputs, *self._outputs))

    def get_inputs(self) -> Sequence[Any]:
        """Return the inputs."""
        return [port.info for port in self._inputs]

    def get_outputs(self) -> Sequence[Any]:
        """Return the outputs."""
        return [port.info for port in self._outputs]

    def get_providers(self) -> List[str]:
        """Return a list that contains only the provider's name."""
        return [self._provider]

    def run(self, output_names: Optional[Sequence[str]], input_feed: Mapping[str, Any]) -> List[Any]:
        """Run the model like onnxruntime's session. The samples of a batch run one after another.

        Raises:
            ValueError: an input is missing or unknown, or its type or shape differs from the model's.
        """
        arrays = [port.check(input_feed) for port in self._inputs]
        if len(input_feed) > len(arrays):
            raise ValueError(f"the model takes only {', '.join(port.info.name for port in self._inputs)}")
        count = len(arrays[0]) if self._one_by_one else 1
        if count == 1:
            outputs = self._run(arrays)
        else:
            if count == 0 or any(len(array) != count for array in arrays):
                raise ValueError("the inputs have different numbers of samples, or none")
            samples = [self._run([array[at : at + 1] for array in arrays]) for at in range(count)]
            outputs = [np.concatenate(parts) for parts in zip(*samples)]
        return outputs if output_names is None else [outputs[self._places[name]] for name in output_names]

    def _run(self, arrays: Sequence[Any]) -> List[Any]:
        for port, array in zip(self._inputs, arrays):
            self._interpreter.set_tensor(port.index, port.encode(array))
        self._interpreter.invoke()
        return [port.decode(self._interpreter.get_tensor(port.index)) for port in self._outputs]

    def end_profiling(self) -> str:
        """Write the file's operators as events of a profile, and return the path of the profile.

        An event has the name of the node that the operator was made from. If the file does not name the node, the event
        has the name of the operator's output. LiteRT's Python interface reports no times, so the durations are 0.
        """
        types = {tensor["index"]: np.dtype(tensor["dtype"]).name for tensor in self._interpreter.get_tensor_details()}
        names = {tensor["index"]: tensor["name"] for tensor in self._interpreter.get_tensor_details()}
        events = [
            {
                "cat": "Kernel",
                "name": self._nodes.get(place) or names.get(int(operator["outputs"][0]), ""),
                "dur": 0,
                "args": {
                    "provider": self._provider,
                    "operator": operator["op_name"],
                    "kernel": f"{operator['op_name']}_{types.get(int(operator['inputs'][0]), '')}",
                },
            }
            for place, operator in enumerate(self._interpreter._get_ops_details())
            # A delegate is listed next to the operators that it runs; it is none of the file's.
            if operator["op_name"] != "DELEGATE" and len(operator["inputs"]) and len(operator["outputs"])
        ]
        file = Path(f"{self._profile}.json")
        file.write_text(json.dumps(events), encoding="utf-8")
        return str(file)


def _build_ports(details: Sequence[Mapping[str, Any]], stated: Any, provider: str, key: str) -> Tuple[_Port, ...]:
    context = f"{SIGNATURE} in the file's metadata, {key}"
    stated = [{}] * len(details) if stated is None else stated
    if (
        not isinstance(stated, list)
        or len(stated) != len(details)
        or not all(isinstance(entry, dict) for entry in stated)
    ):
        raise BundleError(f"{context}: there is not one entry for each of the {len(details)} tensors")
    return tuple(_Port(detail, entry, provider, context) for detail, entry in zip(details, stated))
