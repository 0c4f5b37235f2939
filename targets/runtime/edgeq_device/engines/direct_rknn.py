"""Run models that Rockchip's compiler built. The package rknnlite runs them on the board's NPU.

A session has the part of the interface of `onnxruntime.InferenceSession` that edgeq uses. The model is an ONNX file
with a single node, an EPContext that contains the compiled file. Metadata in the ONNX file list the inputs and outputs.
These are floats in the layout of the original model, and the runtime converts them.
"""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence

import numpy as np

from edgeq_device.engines.catalog import EngineSpec
from edgeq_device.errors import BundleError, RuntimeUnavailableError
from edgeq_device.model.onnxfile import read_context, read_metadata
from edgeq_device.model.tensors import DTYPES, TensorInfo
from edgeq_device.system.places import scratch_folder
from edgeq_device.system.plainjson import parse_json

SIGNATURE = "edgeq_signature"
"""Name of the metadata entry that contains the chip, the compiler's version, the inputs and the outputs, as JSON."""
SOURCE = "rknn"
"""Value of the node's attribute `source`."""
_CORES = "core_mask"
_COMPATIBLE = Path("/proc/device-tree/compatible")
_VENDOR = "rockchip,"
_TYPES = {numpy: name for name, numpy in DTYPES.items()}
_MOST_DIMS = 8


def open_model(
    ort: Any, engine: EngineSpec, model: Any, options: Any, engine_settings: Mapping[str, str]
) -> RknnSession:
    """Open the model at the path `model`; see `edgeq_device.engines.catalog.open_engine`.

    Args:
        engine_settings: the options of the engine: `core_mask`.

    Raises:
        RuntimeUnavailableError: the board has another chip, or the runtime refuses the file.
        BundleError: the file does not contain a compiled model.
    """
    del ort, options
    path = Path(model)
    described = _read_signature(path)
    chip = read_chip(_COMPATIBLE)
    # The device tree names the exact chip (rk3588s), the compiler its family (rk3588).
    if chip and not chip.startswith(described["platform"]):
        raise RuntimeUnavailableError(f"{path.name} was compiled for {described['platform']}, this board has {chip}")
    lite = import_module(f"{engine.module}.api").RKNNLite
    mask = engine_settings.get(_CORES, "NPU_CORE_AUTO")
    # rknnlite loads models from files only.
    with scratch_folder("edgeq-rknn-") as folder:
        file = Path(folder) / "model.rknn"
        file.write_bytes(read_context(path, path.name))
        session = lite()
        _check_status(session.load_rknn(str(file)), f"{engine.module} cannot load {path.name}")
    _check_status(session.init_runtime(core_mask=getattr(lite, mask)), f"{engine.module} cannot start {path.name}")
    return RknnSession(session, described, engine.provider, mask)


def read_chip(compatible: Path) -> str:
    """Return the Rockchip chip in the device tree, such as "rk3588s", or "" if there is none."""
    try:
        names = compatible.read_bytes().split(b"\0")
    except OSError:
        return ""
    texts = (name.decode("ascii", "replace") for name in names)
    # The list goes from the board to its chip.
    return next((name[len(_VENDOR) :] for name in reversed(list(texts)) if name.startswith(_VENDOR)), "")


def _read_signature(path: Path) -> Mapping[str, Any]:
    """Return the chip, the inputs and the outputs from the file's metadata.

    Raises:
        BundleError: the metadata are missing or have another form.
    """
    text = read_metadata(path, SIGNATURE, path.name)
    if text is None:
        raise BundleError(f"{path.name} does not name the inputs and outputs of a compiled model")
    signature = parse_json(text, path.name)
    texts = [signature.get(key) if isinstance(signature, dict) else None for key in ("platform", "compiler")]
    if not all(isinstance(text, str) and text for text in texts):
        raise BundleError(f"{path.name} does not name a chip and a compiler")
    for key in ("inputs", "outputs"):
        entries = signature.get(key)
        if not isinstance(entries, list) or not entries or not all(map(_is_tensor, entries)):
            raise BundleError(f"{path.name}: its {key} are not those of a compiled model")
    return signature


def _is_tensor(entry: Any) -> bool:
    # The file is untrusted, like every model.
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or entry.get("dtype") not in _TYPES:
        return False
    shape = entry.get("shape")
    return isinstance(shape, list) and len(shape) <= _MOST_DIMS and all(type(n) is int and n > 0 for n in shape)


def _check_status(code: Any, problem: str) -> None:
    if code != 0:
        raise RuntimeUnavailableError(f"{problem}: its answer is {code}", "See its output")


class RknnSession:
    """Run a compiled model on the NPU.

    Args:
        lite: an `RKNNLite` that has started.
        described: descriptions of the inputs and outputs.
        provider: name of the engine as an execution provider.
        mask: requested cores of the NPU.
    """

    def __init__(self, lite: Any, described: Mapping[str, Any], provider: str, mask: str) -> None:
        self._lite, self._provider = lite, provider
        self._inputs, self._outputs = (
            tuple(TensorInfo(e["name"], _TYPES[e["dtype"]], list(e["shape"])) for e in described[key])
            for key in ("inputs", "outputs")
        )
        runtime, compiler = " ".join(str(lite.get_sdk_version()).split()), described["compiler"]
        mismatch = "" if compiler in runtime else ", which is not that of the runtime"
        self._providers = [provider, f"cores {mask}", f"runtime {runtime}", f"compiler {compiler}{mismatch}"]

    def get_inputs(self) -> Sequence[Any]:
        """Return the inputs."""
        return self._inputs

    def get_outputs(self) -> Sequence[Any]:
        """Return the outputs."""
        return self._outputs

    def get_providers(self) -> List[str]:
        """Return the provider's name, the requested cores, and the versions of runtime, driver and compiler."""
        return list(self._providers)

    def run(self, output_names: Optional[Sequence[str]], input_feed: Mapping[str, Any]) -> List[Any]:
        """Run the model like onnxruntime's session.

        Raises:
            ValueError: an input is missing or unknown, or its type or shape differs from the model's.
            RuntimeUnavailableError: the NPU gives no answer, or an answer of another form.
        """
        arrays = [self._check_input(info, input_feed) for info in self._inputs]
        if len(input_feed) > len(arrays):
            raise ValueError(f"the model takes only {', '.join(info.name for info in self._inputs)}")
        # Without data_type, rknnlite would treat the values as uint8 pixels.
        kinds = [str(array.dtype) for array in arrays]
        results = self._lite.inference(inputs=arrays, data_type=kinds, data_format=["nchw"] * len(arrays))
        if results is None or len(results) != len(self._outputs):
            raise RuntimeUnavailableError(f"{self._provider} gives no answer", "See its output")
        named = {}
        for info, array in zip(self._outputs, results):
            shape = [n for n in info.shape if isinstance(n, int)]
            size = math.prod(shape)
            if array.size != size:
                raise RuntimeUnavailableError(f"output {info.name!r} has {array.size} values instead of {size}")
            named[info.name] = np.asarray(array, np.dtype(DTYPES[info.type])).reshape(shape)
        return list(named.values()) if output_names is None else [named[name] for name in output_names]

    def _check_input(self, info: Any, feed: Mapping[str, Any]) -> Any:
        """Return the array of one input."""
        if info.name not in feed:
            raise ValueError(f"input {info.name!r} is missing")
        array = np.ascontiguousarray(feed[info.name]).reshape(np.shape(feed[info.name]))
        if array.dtype != np.dtype(DTYPES[info.type]) or list(array.shape) != info.shape:
            expected = f"{DTYPES[info.type]} {info.shape}"
            raise ValueError(f"input {info.name!r} is {array.dtype} {list(array.shape)}, the model takes {expected}")
        return array
