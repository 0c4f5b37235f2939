"""Run models in the package openvino itself, on CPUs that its plug-in for onnxruntime does not support.

A session has the part of the interface of `onnxruntime.InferenceSession` that edgeq uses. Its inputs and outputs are
those that onnxruntime reads from the file, so both engines use the same names.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.engines.catalog import EngineSpec, build_install_command, describe_package
from edgeq_device.engines.session_options import session_options
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.model.tensors import DTYPES, TensorInfo

_CONFIG = "load_config"
"""Option of the plug-in that contains the properties of each device. The package accepts the same properties."""
_MERGED = "originalLayersNames"
_TELEMETRY = "openvino_telemetry"
Sizes = Tuple[Tuple[int, ...], ...]
Described = Tuple[Tuple[Any, ...], ...]
_PLAIN = {"session.disable_prepacking": "1"}


def open_model(
    ort: Any, engine: EngineSpec, model: Any, options: Any, engine_settings: Mapping[str, str]
) -> OpenVinoSession:
    """Open the model at the path `model`; see `edgeq_device.engines.catalog.open_engine`.

    Args:
        engine_settings: the provider options of the engine's plug-in.

    Raises:
        Exception: any error that onnxruntime or openvino raises for the model.
    """
    if not isinstance(model, str):
        raise RuntimeUnavailableError(f"{engine.name} opens models only from files", "Write the model to a file")
    ((device, properties),) = json.loads(engine_settings[_CONFIG]).items()
    # This session only reads the inputs and outputs, so it optimises and prepacks nothing.
    reader_options = session_options(ort, config=_PLAIN, threads=1, optimization="none")
    described = _describe_tensors(ort.InferenceSession(model, reader_options, providers=["CPUExecutionProvider"]))
    profile = options.profile_file_prefix if options.enable_profiling else ""
    core = _import_package(engine).Core()
    return OpenVinoSession(core, model, (device, properties), described, engine.provider, profile)


def _describe_tensors(session: Any) -> Described:
    """Return descriptions of a session's inputs and outputs. The session can then be freed."""
    return tuple(
        tuple(TensorInfo(spec.name, spec.type, list(spec.shape)) for spec in specs)
        for specs in (session.get_inputs(), session.get_outputs())
    )


def _import_package(engine: EngineSpec) -> Any:
    """Import the package without its telemetry, and return the package.

    Once imported, the telemetry would send events and leave files in the home directory. The package does not need it.
    """
    sys.modules.setdefault(_TELEMETRY, None)  # type: ignore[arg-type]  # an import of it fails from now on
    try:
        return import_module(engine.module)
    except Exception as error:  # an import may raise any exception
        problem = f"{describe_package(engine)} cannot be imported: {' '.join(str(error).split())}"
        raise RuntimeUnavailableError(problem, f"Update it: {build_install_command(engine)}") from error


class OpenVinoSession:
    """Run a model that openvino compiles.

    If the model's sizes are fixed, it is compiled when it is opened. Otherwise it is compiled for the sizes of the
    first run. When a later run has other sizes, it is compiled a second time, for open sizes. Each compiled model takes
    as much memory as the weights.

    Args:
        compile_for: device to compile for, and the properties of that device.
        described: inputs and outputs, as onnxruntime describes them.
        provider: name of the engine as an execution provider.
        profile: path prefix of the file that `end_profiling` writes; "" if nothing is profiled.
    """

    def __init__(
        self, core: Any, model: str, compile_for: Tuple[str, Any], described: Described, provider: str, profile: str
    ) -> None:
        self._inputs, self._outputs = described
        unsupported = next((spec.type for spec in (*self._inputs, *self._outputs) if spec.type not in DTYPES), None)
        if unsupported is not None:
            raise RuntimeUnavailableError(f"{provider} does not support {unsupported}")
        self._provider, self._profile = provider, profile
        self._core, self._compile_for = core, compile_for
        self._model = core.read_model(model)
        # Values are passed by position, so both runtimes must have them in one order.
        ports = zip((*self._inputs, *self._outputs), (*self._model.inputs, *self._model.outputs))
        if not all(info.name in port.get_names() for info, port in ports):
            raise RuntimeUnavailableError(f"{provider} has other inputs or outputs than the file, or in another order")
        self._places = {info.name: place for place, info in enumerate(self._outputs)}
        self._open = {place: port.get_partial_shape() for place, port in enumerate(self._model.inputs)}
        self._any_sizes = None if self._model.is_dynamic() else self._compile()
        self._sized: Optional[Tuple[Sizes, Any]] = None
        self._last_request: Any = self._any_sizes

    def _compile(self) -> Any:
        """Compile the model for its present sizes, and return an inference request that runs it."""
        try:
            return self._core.compile_model(self._model, *self._compile_for).create_infer_request()
        except RuntimeError as error:
            text = " ".join(str(error).split())
            raise RuntimeUnavailableError(f"{self._provider} cannot compile the model: {text}") from error

    def get_inputs(self) -> Sequence[Any]:
        """Return the inputs."""
        return self._inputs

    def get_outputs(self) -> Sequence[Any]:
        """Return the outputs."""
        return self._outputs

    def get_providers(self) -> List[str]:
        """Return a list that contains only the provider's name."""
        return [self._provider]

    def run(self, output_names: Optional[Sequence[str]], input_feed: Mapping[str, Any]) -> List[Any]:
        """Run the model like onnxruntime's session.

        Raises:
            ValueError: an input is missing or unknown, or its type or shape differs from the model's.
        """
        arrays = [self._check_input(info, input_feed) for info in self._inputs]
        if len(input_feed) > len(arrays):
            raise ValueError(f"the model takes only {', '.join(info.name for info in self._inputs)}")
        # Keep the request, because `end_profiling` reports on its last run.
        self._last_request = self._choose_request(tuple(array.shape for array in arrays))
        outputs = self._last_request.infer(dict(enumerate(arrays)), share_inputs=True).to_tuple()
        return list(outputs) if output_names is None else [outputs[self._places[name]] for name in output_names]

    def _check_input(self, info: Any, feed: Mapping[str, Any]) -> Any:
        """Return the array of one input. Refuse an array of another type, because openvino would convert it."""
        if info.name not in feed:
            raise ValueError(f"input {info.name!r} is missing")
        array = np.asarray(feed[info.name], order="C")
        fits = len(info.shape) == array.ndim and all(
            not isinstance(size, int) or size == have for size, have in zip(info.shape, array.shape)
        )
        # An input of unknown rank looks like a scalar.
        if array.dtype != np.dtype(DTYPES[info.type]) or not (fits or not info.shape):
            expected = f"{DTYPES[info.type]} {list(info.shape)}"
            raise ValueError(f"input {info.name!r} is {array.dtype} {list(array.shape)}, the model takes {expected}")
        return array

    def _choose_request(self, sizes: Sizes) -> Any:
        """Return an inference request for inputs of these sizes."""
        # Most programs never change the sizes, and fixed sizes run faster.
        if self._any_sizes is None and self._sized is None:
            self._sized = self._compile_sized(sizes)
        if self._sized is not None and self._sized[0] == sizes:
            return self._sized[1]
        if self._any_sizes is None:
            self._model.reshape(self._open)
            self._any_sizes = self._compile()
        return self._any_sizes

    def _compile_sized(self, sizes: Sizes) -> Optional[Tuple[Sizes, Any]]:
        """Compile the model for fixed `sizes`, with which it runs faster than with open ones. Return None if openvino
        can compile it only for open sizes.
        """
        try:
            self._model.reshape(dict(enumerate(map(list, sizes))))
            return sizes, self._compile()
        except (RuntimeError, RuntimeUnavailableError):
            return None

    def end_profiling(self) -> str:
        """Write the layers of the last run in the form that the engine's plug-in uses, and return the path of the file.
        Each layer lists the nodes that it was made from, if openvino keeps their names.
        """
        executed = self._last_request.get_compiled_model().get_runtime_model().get_ordered_ops()
        described = {operation.get_friendly_name(): operation.get_rt_info() for operation in executed}
        merged = {name: str(info[_MERGED].value) for name, info in described.items() if _MERGED in info}
        events: List[Dict[str, Any]] = [
            {
                "cat": "Kernel",
                "name": layer.node_name,
                "dur": layer.real_time.total_seconds() * 1e6,
                "args": {
                    "provider": self._provider,
                    "ov_node_type": layer.node_type,
                    "ov_exec_type": layer.exec_type,
                    _MERGED: merged.get(layer.node_name, ""),
                },
            }
            for layer in self._last_request.get_profiling_info()
            if layer.status == layer.Status.EXECUTED
        ]
        file = Path(f"{self._profile}.json")
        file.write_text(json.dumps(events), encoding="utf-8")
        return str(file)
