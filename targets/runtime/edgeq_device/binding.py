"""A session whose inputs and outputs stay in the device's memory between runs, with a plain one's interface.

Without it every run allocates on the device, and CUDA graphs cannot be replayed: those need fixed addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.dtypes import DTYPES

Key = Tuple[Tuple[str, Tuple[int, ...], str], ...]

_MOST_SHAPES = 8
"""Buffers of so many combinations of input shapes are kept; they take the device's memory."""


@dataclass(frozen=True)
class _Bound:
    """Buffers for one combination of input shapes.

    Attributes:
        opened: outputs whose size may differ from run to run: each run gets them new memory.
    """

    binding: Any
    inputs: Dict[str, Any]
    opened: Tuple[str, ...]


def shapes_of(feeds: Mapping[str, Any]) -> Key:
    """The names, shapes and dtypes of inputs."""
    return tuple(sorted((name, value.shape, str(value.dtype)) for name, value in feeds.items()))


class BoundSession:
    """Wraps an `onnxruntime.InferenceSession`.

    Args:
        device: "cuda" or "cpu".
        notes: what is worth reporting of opening it.
        fixed: run options of a run that finds where outputs of open size go, for good. Without them each run gets such
            outputs new memory: their sizes may depend on the values.
    """

    def __init__(self, session: Any, ort: Any, device: str, notes: Sequence[str] = (), *, fixed: Any = None) -> None:
        self.notes = tuple(notes)
        self._session, self._ort, self._device, self._fixed = session, ort, device, fixed
        self._bindings: Dict[Key, _Bound] = {}

    def __getattr__(self, name: str) -> Any:
        """The rest of a session's interface."""
        return getattr(self._session, name)

    def run(self, names: Optional[Sequence[str]], feeds: Mapping[str, Any], run_options: Any = None) -> List[Any]:
        """As `InferenceSession.run`; inputs are copied into the buffers that the last run of these shapes used."""
        arrays = {name: np.asarray(value, order="C") for name, value in feeds.items()}
        key = shapes_of(arrays)
        bound = self._bindings.get(key) or self._bind(arrays)
        if len(self._bindings) < _MOST_SHAPES:
            self._bindings[key] = bound
        for name, array in arrays.items():
            bound.inputs[name].update_inplace(array)
        for name in bound.opened:
            bound.binding.bind_output(name, self._device, 0)
        self._session.run_with_iobinding(bound.binding, run_options)
        made = dict(zip((spec.name for spec in self.get_outputs()), bound.binding.copy_outputs_to_cpu()))
        results = [made[name] for name in names or made]
        # On the CPU these are views of the buffers that the next run writes to.
        return [result.copy() for result in results] if self._device == "cpu" else results

    def _bind(self, arrays: Mapping[str, Any]) -> _Bound:
        binding, values, opened = self._session.io_binding(), {}, []
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
                opened.append(spec.name)
        if self._fixed is None or not opened:
            return _Bound(binding, values, tuple(opened))
        self._session.run_with_iobinding(binding, self._fixed)
        for spec, value in zip(self.get_outputs(), binding.get_outputs()):
            binding.bind_ortvalue_output(spec.name, value)
        return _Bound(binding, values, ())
