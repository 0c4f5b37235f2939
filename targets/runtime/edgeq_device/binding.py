"""A session whose inputs and outputs stay in the device's memory between runs, with a plain one's interface.

Without it every run allocates on the device, and CUDA graphs cannot be replayed: those need fixed addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.dtypes import DTYPES

Key = Tuple[Tuple[str, Tuple[int, ...], str], ...]

_MOST_SHAPES = 8
"""Buffers, and a captured graph, of so many combinations of input shapes are kept; each takes the device's memory."""
_GRAPH, _NO_GRAPH = "gpu_graph_id", "-1"


@dataclass
class _Bound:
    """Buffers for one combination of input shapes.

    Attributes:
        graph: number of the captured graph, or `_NO_GRAPH`.
        opened: outputs whose size may differ from run to run: each gets new memory.
    """

    binding: Any
    inputs: Dict[str, Any]
    graph: str
    opened: Tuple[str, ...] = ()
    runs: int = 0


class BoundSession:
    """Wraps an `onnxruntime.InferenceSession`.

    Args:
        device: "cuda" or "cpu".
        notes: what is worth reporting of opening it.
        plain: where `session` captures CUDA graphs, opens the same model without: the first run of a model that no
            graph can hold goes on there.
    """

    def __init__(
        self,
        session: Any,
        ort: Any,
        device: str,
        notes: Sequence[str] = (),
        *,
        plain: Optional[Callable[[], Any]] = None,
    ) -> None:
        self.notes = tuple(notes)
        self._session, self._ort, self._device, self._plain = session, ort, device, plain
        self._bindings: Dict[Key, _Bound] = {}

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
        bound = self._bindings.get(key) or self._bind(key, arrays)
        for name, array in arrays.items():
            bound.inputs[name].update_inplace(array)
        for name in bound.opened:
            bound.binding.bind_output(name, self._device, 0)
        try:
            self._session.run_with_iobinding(bound.binding, self._options(bound.graph, run_options))
        except Exception as error:  # onnxruntime's exceptions have no common base
            if self._plain is None or bound.runs or bound.graph == _NO_GRAPH:
                raise
            self.notes = (*self.notes, f"no CUDA graph holds this model: {' '.join(str(error).split())}")
            self._session, self._plain = self._plain(), None
            self._bindings.clear()
            return self.run(names, feeds, run_options)
        bound.runs += 1
        made = dict(zip((spec.name for spec in self.get_outputs()), bound.binding.copy_outputs_to_cpu()))
        results = [made[name] for name in names or made]
        # On the CPU these are views of the buffers that the next run writes to.
        return [result.copy() for result in results] if self._device == "cpu" else results

    def _options(self, graph: str, given: Any) -> Any:
        if self._plain is None:
            return given
        options = given if given is not None else self._ort.RunOptions()
        options.add_run_config_entry(_GRAPH, graph)
        return options

    def _bind(self, key: Key, arrays: Mapping[str, Any]) -> _Bound:
        kept = len(self._bindings) < _MOST_SHAPES
        binding, values = self._session.io_binding(), {}
        for name, array in arrays.items():
            # A copy: on the CPU the value would be the caller's own array, and the next run would write into it.
            values[name] = self._ort.OrtValue.ortvalue_from_numpy(array.copy(), self._device, 0)
            binding.bind_ortvalue_input(name, values[name])
        opened = []
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
        bound = _Bound(binding, values, str(len(self._bindings) + 1) if kept else _NO_GRAPH, tuple(opened))
        if kept:
            self._bindings[key] = bound
            if self._plain is not None and opened:
                self._fix(bound)
        return bound

    def _fix(self, bound: _Bound) -> None:
        """Give outputs of open size the addresses that a run without a graph gives them."""
        self._session.run_with_iobinding(bound.binding, self._options(_NO_GRAPH, None))
        made = dict(zip((spec.name for spec in self.get_outputs()), bound.binding.get_outputs()))
        for name in bound.opened:
            bound.binding.bind_ortvalue_output(name, made[name])
        bound.opened = ()
