"""Open .tflite files in TFLite Micro, to find out what its kernels compute on microcontrollers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List, Mapping

import numpy as np

from edgeq_device.engines.catalog import EngineSpec
from edgeq_device.engines.direct_litert import LiteRtSession, read_signature
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.system.files import read_file

_INTERPRETER = "python.tflite_micro.runtime"
# First guess: the activations may be many times larger than the file, so `_allocate` tries more.
_ARENA_TIMES = 10
# With the upper bound, the model is refused for another reason than memory.
_LEAST_ARENA, _MOST_ARENA = 1 << 20, 1 << 30
_ARENA = "arena_bytes"


def open_model(
    ort: Any, engine: EngineSpec, model: Any, options: Any, engine_settings: Mapping[str, str]
) -> LiteRtSession:
    """Open the model at the path `model`; see `edgeq_device.engines.catalog.open_engine`.

    Raises:
        RuntimeUnavailableError: the file is not a .tflite file, or TFLite Micro has no kernel for it.
        BundleError: the metadata do not have edgeq's form.
    """
    del ort, options
    if not isinstance(model, str) or not model.endswith(engine.suffix):
        raise RuntimeUnavailableError(f"{engine.name} opens only {engine.suffix} files", "Convert the model")
    content = read_file(Path(model))
    stated = read_signature(content, model)
    runtime = import_module(f"{engine.module}.{_INTERPRETER}").Interpreter
    interpreter = _allocate(runtime, content, model, int(engine_settings.get(_ARENA, 0)))
    return LiteRtSession(_Interpreter(interpreter), stated, engine.provider, "")


def _allocate(runtime: Any, content: bytes, model: str, requested_bytes: int) -> Any:
    """Return an interpreter with enough memory for the activations, which may be larger than the file.

    Args:
        requested_bytes: bytes of memory to use; 0 uses as much as the model needs.

    Raises:
        RuntimeUnavailableError: TFLite Micro refuses the model, or the model needs more memory than `requested_bytes`.
    """
    arena = requested_bytes or max(_LEAST_ARENA, _ARENA_TIMES * len(content))
    while True:
        try:
            return runtime.from_bytes(content, arena_size=arena)
        except RuntimeError as error:
            if requested_bytes or arena >= _MOST_ARENA:
                raise RuntimeUnavailableError(f"TFLite Micro refuses {model}: {error}") from error
            # TFLite Micro does not tell how much it lacks.
            arena *= 8


class _Interpreter:
    """Give TFLite Micro's interpreter the same methods as LiteRT's. The index of a tensor is its position among the
    inputs or outputs.
    """

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter

    def get_input_details(self) -> List[Dict[str, Any]]:
        """Return the inputs."""
        return _read_details(self._interpreter.get_input_details, 0)

    def get_output_details(self) -> List[Dict[str, Any]]:
        """Return the outputs."""
        return _read_details(self._interpreter.get_output_details, _OUTPUTS)

    def set_tensor(self, index: int, array: Any) -> None:
        """Set an input."""
        self._interpreter.set_input(array, index)

    def invoke(self) -> None:
        """Run the model."""
        self._interpreter.invoke()

    def get_tensor(self, index: int) -> Any:
        """Return an output."""
        return self._interpreter.get_output(index - _OUTPUTS)


# Tells the indices of outputs from those of inputs.
_OUTPUTS = 1 << 16


def _read_details(read_detail: Any, base: int) -> List[Dict[str, Any]]:
    """Return the descriptions of all inputs or outputs. The interpreter does not report how many there are, so
    `read_detail` is called until it raises an error.
    """
    details: List[Dict[str, Any]] = []
    while True:
        try:
            detail = read_detail(len(details))
        except (IndexError, RuntimeError, ValueError):
            return details
        scales, zeros = (detail["quantization_parameters"][key] for key in ("scales", "zero_points"))
        scale_and_zero = (float(scales[0]), int(zeros[0])) if len(scales) else (0.0, 0)
        entry = {"name": f"{base + len(details)}", "index": base + len(details), "shape": np.asarray(detail["shape"])}
        details.append({**entry, "dtype": detail["dtype"], "quantization": scale_and_zero})
