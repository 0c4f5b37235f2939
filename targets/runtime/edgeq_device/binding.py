"""A session whose inputs and outputs stay in the device's memory between runs, with a plain one's interface.

Without it every run allocates on the device, and CUDA graphs cannot be replayed: those need fixed addresses.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.dtypes import DTYPES

Key = Tuple[Tuple[str, Tuple[int, ...], str], ...]


class BoundSession:
    """Wraps an `onnxruntime.InferenceSession`.

    Args:
        device: "cuda" or "cpu".
        notes: what is worth reporting of opening it.
    """

    def __init__(self, session: Any, ort: Any, device: str, notes: Sequence[str] = ()) -> None:
        self.notes = tuple(notes)
        self._session, self._ort, self._device = session, ort, device
        self._bindings: Dict[Key, Tuple[Any, Dict[str, Any]]] = {}

    def get_inputs(self) -> Any:
        """The inputs of the wrapped session: `name`, `type` and `shape` each."""
        return self._session.get_inputs()

    def get_outputs(self) -> Any:
        """The outputs of the wrapped session: `name`, `type` and `shape` each."""
        return self._session.get_outputs()

    def get_providers(self) -> Any:
        """The execution providers that really started, by ONNX Runtime's names."""
        return self._session.get_providers()

    def end_profiling(self) -> Any:
        """Close ONNX Runtime's profile and return the path of its file."""
        return self._session.end_profiling()

    def run(self, names: Optional[Sequence[str]], feeds: Mapping[str, Any], run_options: Any = None) -> List[Any]:
        """As `InferenceSession.run`; inputs are copied into the buffers that the last run of these shapes used."""
        arrays = {name: np.asarray(value, order="C") for name, value in feeds.items()}
        key = tuple(sorted((name, value.shape, str(value.dtype)) for name, value in arrays.items()))
        if key not in self._bindings:
            self._bindings[key] = self._bind(arrays)
        binding, values = self._bindings[key]
        for name, array in arrays.items():
            values[name].update_inplace(array)
        self._session.run_with_iobinding(binding, run_options)
        made = dict(zip((spec.name for spec in self.get_outputs()), binding.copy_outputs_to_cpu()))
        results = [made[name] for name in names or made]
        # On the CPU these are views of the buffers that the next run writes to.
        return [result.copy() for result in results] if self._device == "cpu" else results

    def _bind(self, arrays: Mapping[str, Any]) -> Tuple[Any, Dict[str, Any]]:
        binding = self._session.io_binding()
        values = {}
        for name, array in arrays.items():
            # A copy: on the CPU the value would be the caller's own array, and the next run would write into it.
            values[name] = self._ort.OrtValue.ortvalue_from_numpy(array.copy(), self._device, 0)
            binding.bind_ortvalue_input(name, values[name])
        for spec in self.get_outputs():
            dtype = DTYPES.get(spec.type)
            if dtype is not None and all(isinstance(size, int) for size in spec.shape):
                # A fixed address, which a captured graph writes to.
                shape = list(spec.shape)
                value = self._ort.OrtValue.ortvalue_from_shape_and_type(shape, np.dtype(dtype), self._device, 0)
                binding.bind_ortvalue_output(spec.name, value)
            else:
                binding.bind_output(spec.name, self._device, 0)
        return binding, values
