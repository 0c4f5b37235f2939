"""Open sessions of onnxruntime's own CUDA provider.

edgeq loads the provider's libraries, checks that the provider has started, and keeps inputs and outputs in buffers on
the device between runs. Otherwise every run would allocate memory there. If possible, a CUDA graph replays the whole
model in one launch; the graph requires that these buffers keep their addresses. The sessions have the interface of a
plain session.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.model.tensors import DTYPES, is_name

Key = Tuple[Tuple[str, Tuple[int, ...], str], ...]

_MOST_SHAPES = 8
"""Number of input-shape combinations whose buffers are kept. The buffers take memory of the device."""


@dataclass(frozen=True)
class _Bound:
    """Hold the buffers for one combination of input shapes.

    Attributes:
        unsized: outputs whose size may differ from run to run. Each run allocates new memory for them.
    """

    binding: Any
    inputs: Dict[str, Any]
    unsized: Tuple[str, ...]


def read_shapes(feeds: Mapping[str, Any]) -> Key:
    """Return the names, shapes and dtypes of inputs."""
    return tuple(sorted((name, value.shape, str(value.dtype)) for name, value in feeds.items()))


def _order_rows(feeds: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the inputs as arrays in C order (row by row)."""
    return {name: np.asarray(value, order="C") for name, value in feeds.items()}


class BoundSession:
    """Wrap an `onnxruntime.InferenceSession` and keep its inputs and outputs in buffers on the device.

    Args:
        device: "cuda" or "cpu".
        notes: remarks from opening the session, for the report.
        fixed: run options for an extra first run with each combination of input shapes. The outputs of that run become
            the buffers of outputs with open sizes. None: each run allocates new memory for such outputs, because their
            sizes may depend on the input values.
    """

    def __init__(self, session: Any, ort: Any, device: str, notes: Sequence[str] = (), *, fixed: Any = None) -> None:
        self.notes = tuple(notes)
        self._session, self._ort, self._device, self._fixed = session, ort, device, fixed
        self._bindings: Dict[Key, _Bound] = {}

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped session."""
        return getattr(self._session, name)

    def run(self, names: Optional[Sequence[str]], feeds: Mapping[str, Any], run_options: Any = None) -> List[Any]:
        """Run like `InferenceSession.run`. Inputs are copied into the buffers of earlier runs with the same shapes."""
        arrays = _order_rows(feeds)
        key = read_shapes(arrays)
        bound = self._bindings.get(key) or self._bind(arrays)
        if len(self._bindings) < _MOST_SHAPES:
            self._bindings[key] = bound
        for name, array in arrays.items():
            bound.inputs[name].update_inplace(array)
        for name in bound.unsized:
            bound.binding.bind_output(name, self._device, 0)
        self._session.run_with_iobinding(bound.binding, run_options)
        outputs = dict(zip((spec.name for spec in self.get_outputs()), bound.binding.copy_outputs_to_cpu()))
        results = [outputs[name] for name in names or outputs]
        # On the CPU the results are views of the buffers that the next run writes to.
        return [result.copy() for result in results] if self._device == "cpu" else results

    def _bind(self, arrays: Mapping[str, Any]) -> _Bound:
        binding, values, unsized = self._session.io_binding(), {}, []
        for name, array in arrays.items():
            # Copy: on the CPU the value would otherwise be the caller's array, and the next run would write into it.
            values[name] = self._ort.OrtValue.ortvalue_from_numpy(array.copy(), self._device, 0)
            binding.bind_ortvalue_input(name, values[name])
        for spec in self.get_outputs():
            dtype = DTYPES.get(spec.type)
            if dtype is not None and all(isinstance(size, int) for size in spec.shape):
                # A captured graph writes to a fixed address.
                shape = list(spec.shape)
                value = self._ort.OrtValue.ortvalue_from_shape_and_type(shape, np.dtype(dtype), self._device, 0)
                binding.bind_ortvalue_output(spec.name, value)
            else:
                binding.bind_output(spec.name, self._device, 0)
                unsized.append(spec.name)
        if self._fixed is None or not unsized:
            return _Bound(binding, values, tuple(unsized))
        self._session.run_with_iobinding(binding, self._fixed)
        for spec, value in zip(self.get_outputs(), binding.get_outputs()):
            binding.bind_ortvalue_output(spec.name, value)
        return _Bound(binding, values, ())


CUDA, _CPU, _MEMORY = "CUDAExecutionProvider", "CPUExecutionProvider", "cuda"
_GRAPHS = {"enable_cuda_graph": "1"}
_ERRORS, _FATAL = 3, 4

OpenWith = Callable[[List[Any]], Any]


class CapturedSession:
    """Capture runs with the first input shapes as a CUDA graph. The object is used like a `BoundSession`.

    Other shapes run in a second session. A graph keeps using the memory of the session that captured it, and other runs
    in that session would overwrite that memory. On an H100 with onnxruntime 1.31.1, such a run caused an illegal memory
    access.

    Args:
        captured: a session that captures graphs.
        open_uncaptured: function that opens the same model without capture, for other shapes and for models that cannot
            be captured.
    """

    def __init__(self, captured: Any, ort: Any, device: str, open_uncaptured: Callable[[], BoundSession]) -> None:
        uncaptured = ort.RunOptions()
        uncaptured.add_run_config_entry("gpu_graph_id", "-1")
        self.notes: Tuple[str, ...] = ()
        self._captured: Optional[BoundSession] = BoundSession(captured, ort, device, fixed=uncaptured)
        self._uncaptured_session: Optional[BoundSession] = None
        self._open_plain = open_uncaptured
        self._shapes: Optional[Key] = None

    def run(self, names: Optional[Sequence[str]], feeds: Mapping[str, Any], run_options: Any = None) -> List[Any]:
        """Run like `InferenceSession.run`."""
        arrays = _order_rows(feeds)
        shapes = read_shapes(arrays)
        if self._captured is None or self._shapes not in (None, shapes):
            return self._uncaptured.run(names, arrays, run_options)
        try:
            results = self._captured.run(names, arrays, run_options)
        except Exception as error:  # onnxruntime's exceptions have no common base
            if self._shapes is not None:
                raise
            results = self._uncaptured.run(names, arrays, run_options)  # raises if the inputs are wrong
            self.notes = (*self.notes, f"this model cannot be captured as a CUDA graph: {' '.join(str(error).split())}")
            self._captured = None
            return results
        self._shapes = shapes
        return results

    @property
    def _uncaptured(self) -> BoundSession:
        if self._uncaptured_session is None:
            self._uncaptured_session = self._open_plain()
        return self._uncaptured_session

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the session in use."""
        return getattr(self._captured or self._uncaptured, name)


def open_cuda(ort: Any, options: Mapping[str, str], open_with: OpenWith) -> Union[BoundSession, CapturedSession]:
    """Return a session on the GPU. Operators that CUDA does not run are left to the CPU.

    Args:
        options: options of the provider.
        open_with: function that takes a list of providers and returns an open session.

    Raises:
        RuntimeUnavailableError: the provider does not start. ONNX Runtime itself would continue on the CPU.
    """
    load_libraries(ort)

    def open_uncaptured() -> BoundSession:
        return BoundSession(check_started(ort, CUDA, open_with([(CUDA, dict(options)), _CPU])), ort, _MEMORY)

    session = open_uncaptured()
    if not has_known_sizes(session):
        return session
    try:
        captured = check_started(ort, CUDA, open_with([(CUDA, {**options, **_GRAPHS}), _CPU]))
    # onnxruntime refuses graphs that are split between providers, and its exceptions have no common base
    except Exception:
        return session
    return CapturedSession(captured, ort, _MEMORY, open_uncaptured)


def load_libraries(ort: Any) -> None:
    """Load CUDA and cuDNN from their wheels, if they are installed as wheels."""
    _set_log_severity(ort, _ERRORS)
    preload = getattr(ort, "preload_dlls", None)
    if preload is not None:
        with redirect_stdout(sys.stderr):  # the function prints the missing libraries, and stdout may be for JSON
            preload(directory="")


def check_started(ort: Any, provider: str, session: Any) -> Any:
    """Return the session if `provider` is among its providers.

    Raises:
        RuntimeUnavailableError: the provider is not among them.
    """
    if provider not in session.get_providers():
        raise RuntimeUnavailableError(
            f"onnxruntime {ort.__version__} lists {provider}, but cannot start it here",
            "See its messages above: a library of CUDA, cuDNN or TensorRT is missing or of another version",
        )
    _set_log_severity(ort, _FATAL)
    return session


def _set_log_severity(ort: Any, severity: int) -> None:
    """Set the lowest severity that onnxruntime logs to stderr.

    Only the log contains the reason why a provider does not start. Once the provider runs, however, the log would also
    contain each cuDNN plan that was tried without success.
    """
    choose = getattr(ort, "set_default_logger_severity", None)
    if choose is not None:
        choose(severity)


def has_known_sizes(session: Any) -> bool:
    """Return whether each size of the outputs is a number, or a name that also occurs in the inputs' shapes. Other
    sizes may depend on the input values, and a captured graph would repeat the sizes of its first run.
    """
    input_sizes = {
        size for spec in session.get_inputs() for size in spec.shape if isinstance(size, str) and is_name(size)
    }
    return all(isinstance(size, int) or size in input_sizes for spec in session.get_outputs() for size in spec.shape)
