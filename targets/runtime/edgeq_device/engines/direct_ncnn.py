"""Open .ncnn files in ncnn, whose kernels run on ARM and x86 CPUs.

A session has the part of the interface of `onnxruntime.InferenceSession` that edgeq uses. The file describes the inputs
and outputs of the original model, and the session presents those. ncnn's arrays have no batch axis, so the samples of
a batch run one after another.
"""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.engines.catalog import EngineSpec
from edgeq_device.engines.ncnn_file import PARAM, WEIGHTS, NcnnFile, NcnnLayer, list_layers, read_ncnn
from edgeq_device.engines.ncnn_file import read_signature as read_signature  # the catalog calls it
from edgeq_device.errors import BundleError, RuntimeUnavailableError
from edgeq_device.model.tensors import DTYPES, TensorInfo
from edgeq_device.system.files import read_file
from edgeq_device.system.places import scratch_folder

_THREADS, _FP16 = "num_threads", "fp16"
_ON = "on"
_FP16_OPTIONS = ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic")
# ncnn's defaults differ between CPUs and releases, so every option that changes answers is set.
_DEFAULTS: Mapping[str, bool] = {
    "use_bf16_storage": False,
    # int8 Winograd F(4,3) adds in numbers that wrap. A file whose layers are bounded switches it on.
    "use_winograd43_convolution": False,
}
# These hold whatever a file states: a GPU would not run the kernels of the proof.
_ALWAYS: Mapping[str, bool] = {"lightmode": True, "use_int8_inference": True, "use_vulkan_compute": False}
# A file is untrusted, so it sets only options that choose between kernels.
_FILE_OPTIONS = frozenset(
    {
        *_FP16_OPTIONS,
        "use_bf16_storage",
        "use_vulkan_compute",
        "use_packing_layout",
        "use_sgemm_convolution",
        "use_winograd_convolution",
        "use_winograd23_convolution",
        "use_winograd43_convolution",
        "use_winograd63_convolution",
    }
)
_MOST_PORTS, _MOST_AXES = 64, 5
_FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)")


def open_model(
    ort: Any, engine: EngineSpec, model: Any, options: Any, engine_settings: Mapping[str, str]
) -> NcnnSession:
    """Open the model at the path `model`; see `edgeq_device.engines.catalog.open_engine`.

    Args:
        engine_settings: `num_threads`, and `fp16`: "on" stores and computes float values in 16 bits where the CPU has
            instructions for it.

    Raises:
        RuntimeUnavailableError: the file is not a .ncnn file, or ncnn refuses it.
        BundleError: the file is damaged.
    """
    del ort
    if not isinstance(model, str) or not model.endswith(engine.suffix):
        raise RuntimeUnavailableError(f"{engine.name} opens only {engine.suffix} files", "Convert the model")
    file = read_ncnn(read_file(Path(model)), model)
    layers, ports, stated = describe_file(file, model)
    net = import_module(engine.module).Net()
    # The engine's precision decides, because a bundle records it.
    precision = dict.fromkeys(_FP16_OPTIONS, engine_settings.get(_FP16) == _ON)
    for name, value in {**_DEFAULTS, **stated, **_ALWAYS, **precision}.items():
        setattr(net.opt, name, value)
    # Kernels are chosen at loading, by the number of threads at that time. By default ncnn uses all cores, and its
    # threads wait for each other without sleeping: next to other work, a run took a thousand times as long.
    net.opt.num_threads = int(engine_settings.get(_THREADS, 1))
    # ncnn's Python interface reads a model's weights only from a file.
    with scratch_folder("edgeq-ncnn-") as folder:
        for name, content, load in ((PARAM, file.param, net.load_param), (WEIGHTS, file.weights, net.load_model)):
            (folder / name).write_bytes(content)
            if load(str(folder / name)) != 0:
                raise RuntimeUnavailableError(f"{engine.module} cannot load the {name} of {model}", "See its output")
    profile = options.profile_file_prefix if options.enable_profiling else ""
    return NcnnSession(import_module(engine.module), net, ports, layers, engine.provider, profile)


def describe_file(
    file: NcnnFile, context: str
) -> Tuple[List[NcnnLayer], Tuple[Tuple[_NcnnPort, ...], ...], Dict[str, bool]]:
    """Return the layers of a file, its inputs and outputs, and the options that it sets.

    Raises:
        BundleError: the file is damaged.
    """
    layers = list_layers(file, context)
    ports = tuple(_parse_ports(file.signature[key], f"{context}: {key}") for key in ("inputs", "outputs"))
    return layers, ports, _check_options(file.signature.get("options", {}), context)


def _check_options(stated: Any, context: str) -> Dict[str, bool]:
    """Return the options that a file sets."""
    if not isinstance(stated, dict) or not all(isinstance(value, bool) for value in stated.values()):
        raise BundleError(f"{context}: its options are not a table of true and false")
    unknown = sorted(stated.keys() - _FILE_OPTIONS)
    if unknown:
        raise BundleError(f"{context}: a file may not set {unknown[0]!r}")
    return dict(stated)


class _NcnnPort:
    """Convert between an input or output of the model and its blob.

    Args:
        entry: description of the input or output; see `edgeq_device.engines.ncnn_file.read_signature`.
    """

    def __init__(self, entry: Mapping[str, Any], context: str) -> None:
        name, blob, kind = (entry.get(key) for key in ("name", "blob", "type"))
        shape, sizes = (_to_list(entry.get(key)) for key in ("shape", "sizes"))
        if not isinstance(name, str) or not isinstance(blob, str) or kind not in _FLOATS:
            raise BundleError(f"{context}: an entry has no name, blob or type of floats")
        if not all(type(size) is int and size > 0 for size in sizes) or not sizes or not _fits(shape, sizes):
            raise BundleError(f"{context}: the shape and the sizes of {name!r} do not match")
        self.blob: str = blob
        self.info = TensorInfo(name, kind, shape)
        self.dtype = np.dtype(DTYPES[kind])
        self.fixed: Tuple[int, ...] = tuple(sizes)
        # ncnn's arrays have no axis of samples.
        self.blob_sizes: Tuple[int, ...] = self.fixed[1:] if len(sizes) > 1 and sizes[0] == 1 else self.fixed

    @property
    def batched(self) -> bool:
        """Return whether the model takes any number of samples, although the blob has room for only one."""
        return self.fixed[0] == 1 and not isinstance(self.info.shape[0], int)

    def check(self, feed: Mapping[str, Any]) -> Any:
        """Return the array of this input in `feed`.

        Raises:
            ValueError: the array is missing, or its type or shape is wrong.
        """
        if self.info.name not in feed:
            raise ValueError(f"input {self.info.name!r} is missing")
        array = np.asarray(feed[self.info.name])
        open_axis = 1 if self.batched else 0
        fits = array.ndim == len(self.fixed) and array.shape[open_axis:] == self.fixed[open_axis:]
        if array.dtype != self.dtype or not fits:
            actual, expected = f"{array.dtype} {list(array.shape)}", f"{self.dtype} {self.info.shape}"
            raise ValueError(f"input {self.info.name!r} is {actual}, the model takes {expected}")
        return array


def _to_list(value: Any) -> List[Any]:
    """Return a list of sizes, or an empty list if `value` is none."""
    return value if isinstance(value, list) and len(value) <= _MOST_AXES else []


def _fits(shape: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return whether `shape` has these sizes. Some of its axes may be open and match any size."""
    return len(shape) == len(sizes) and all(
        axis is None or isinstance(axis, str) or axis == size for axis, size in zip(shape, sizes)
    )


def _parse_ports(entries: Sequence[Mapping[str, Any]], context: str) -> Tuple[_NcnnPort, ...]:
    if not 1 <= len(entries) <= _MOST_PORTS:
        raise BundleError(f"{context} has not 1 to {_MOST_PORTS} entries")
    return tuple(_NcnnPort(entry, context) for entry in entries)


class NcnnSession:
    """Run a model in ncnn.

    Args:
        ncnn: the module.
        net: the loaded model.
        ports: inputs and outputs.
        layers: the layers of the file.
        profile: path prefix of the file that `end_profiling` writes; "" if nothing is profiled.
    """

    def __init__(
        self,
        ncnn: Any,
        net: Any,
        ports: Tuple[Tuple[_NcnnPort, ...], ...],
        layers: Sequence[NcnnLayer],
        provider: str,
        profile: str,
    ) -> None:
        self._ncnn, self._net, self._layers = ncnn, net, layers
        self._inputs, self._outputs = ports
        self._provider, self._profile = provider, profile
        self._places = {port.info.name: place for place, port in enumerate(self._outputs)}
        # A batch runs sample by sample.
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
            RuntimeUnavailableError: ncnn fails, or an output has another number of values than the file states.
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
        extractor = self._net.create_extractor()
        # A Mat of an array only refers to its memory. The clones must live as long as the extractor reads them.
        clones = []
        for port, array in zip(self._inputs, arrays):
            floats = np.ascontiguousarray(array.reshape(port.blob_sizes), dtype=np.float32)
            clones.append(self._ncnn.Mat(floats).clone())
            self._check(extractor.input(port.blob, clones[-1]), port)
        outputs = []
        for port in self._outputs:
            code, blob = extractor.extract(port.blob)
            self._check(code, port)
            # The copy is made now, because the blob's memory belongs to the extractor.
            values = np.array(blob, dtype=port.dtype)
            if values.size != math.prod(port.fixed):
                # ncnn computes some layers into a blob of a wrong size without an error.
                expected = f"instead of {list(port.blob_sizes)}"
                raise RuntimeUnavailableError(f"output {port.info.name!r} is {list(values.shape)} {expected}")
            outputs.append(values.reshape(port.fixed))
        return outputs

    def _check(self, code: int, port: _NcnnPort) -> None:
        if code != 0:
            raise RuntimeUnavailableError(f"{self._provider} fails at {port.info.name!r}: its answer is {code}")

    def end_profiling(self) -> str:
        """Write the file's layers as events of a profile, and return the path of the profile. ncnn's Python interface
        reports no times, so the durations are 0.
        """
        events = [
            {
                "cat": "Kernel",
                "name": layer.name,
                "dur": 0,
                "args": {
                    "provider": self._provider,
                    "operator": layer.type,
                    "kernel": f"{layer.type}_{'int8' if layer.int8 else 'float32'}",
                },
            }
            for layer in self._layers
            if layer.type not in _NO_WORK
        ]
        file = Path(f"{self._profile}.json")
        file.write_text(json.dumps(events), encoding="utf-8")
        return str(file)


# Layers that only name blobs.
_NO_WORK = ("Input", "Split")
