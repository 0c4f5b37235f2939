"""A session of a float model that gives the tensors under observation, at the least cost.

ONNX Runtime computes convolutions in a blocked channel layout where the CPU gains from it. A tensor in the middle that
is fetched is converted to the plain layout; for Clip, which has only a kernel for the plain layout, there and back.
Counting values does not depend on their order. So the optimised graph is written out once, and the conversions that
serve nothing but the observation are removed; what is fetched then is the blocked tensor itself. Tensors whose channels
do not fill the blocks keep their conversion, because the padding is no data.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from edgeq_device.arrays import one_array
from numpy.typing import NDArray

from edgeq.errors import DataError
from edgeq.model.edit import with_outputs
from edgeq.model.graph import GraphIndex, is_op, name_of, node_input
from edgeq.model.prepare import open_in_memory
from edgeq.model.tensors import weight_bytes
from edgeq.run.session import SessionSettings

_BLOCKED = "com.microsoft.nchwc"
_WIDEST_BLOCK = 16
_LARGEST = 2**29
"""Bytes of weights. The optimised graph of a larger model is not written out: it would fill the temporary folder."""
_WEIGHTS_BESIDE = {
    "session.optimized_model_external_initializers_file_name": "optimised.onnx.data",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
}
_FLOATS = ("tensor(float)", "tensor(float16)")


class InstrumentedModel:
    """Runs a model and gives `names`, in that order.

    Args:
        model: the model; it is not changed.
        names: tensors made by nodes of the main graph.
        keep_layout: those of `names` that are wanted in their own layout, not just with all their values.
        threads: threads inside an operator; 0 leaves it to ONNX Runtime.

    Attributes:
        fetched: for each of `names`, the tensor of the optimised graph that is fetched.
        optimised: that graph, whose weights are in files that live as long as this object; None where it was not
            written.

    Raises:
        RuntimeUnavailableError: ONNX Runtime is missing, or refuses the model.
    """

    def __init__(
        self, model: ir.Model, names: Sequence[str], *, keep_layout: Collection[str] = (), threads: int = 0
    ) -> None:
        self.names = tuple(names)
        self.keep_layout = frozenset(keep_layout)
        self.threads = threads
        self.fetched = list(names)
        self.optimised: ir.Model | None = None
        settings = SessionSettings(intra_op_threads=threads)
        observed = with_outputs(model, names)
        if weight_bytes(model) > _LARGEST or not any(node.op_type == "Conv" for node in model.graph):
            self._session = open_in_memory(observed, settings)
            return
        folder = Path(tempfile.mkdtemp(prefix="edgeq-calibrate-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        written = folder / "optimised.onnx"
        self._session = open_in_memory(observed, replace(settings, config=_WEIGHTS_BESIDE, save_optimized_to=written))
        self.optimised = ir.load(written)
        blocked = without_conversions(self.optimised, names, keep_layout)
        if blocked:
            self.fetched = [blocked.get(name, name) for name in names]
            del self._session
            self._session = open_in_memory(self.optimised, replace(settings, optimization="none"))

    def floats(self) -> frozenset[str]:
        """Those of the names that are float32 or float16 tensors, by the types that ONNX Runtime infers."""
        kinds = {output.name: output.type for output in self._session.get_outputs()}
        return frozenset(n for n, fetched in zip(self.names, self.fetched, strict=True) if kinds[fetched] in _FLOATS)

    def run(self, inputs: Mapping[str, NDArray[Any]], sample: str) -> list[NDArray[Any]]:
        """The tensors for one sample.

        Args:
            inputs: input name → array, of the types and shapes of the model's inputs.
            sample: its name, for messages.

        Raises:
            DataError: ONNX Runtime refuses the sample.
        """
        try:
            values = self._session.run(self.fetched, dict(inputs))
        except Exception as error:  # onnxruntime raises unrelated types, some of them bare Exception
            text = " ".join(str(error).split())
            raise DataError(f"onnxruntime cannot run sample {sample}: {text}", "Check its names and shapes") from error
        return [one_array(value) for value in values]


def without_conversions(model: ir.Model, names: Sequence[str], keep_layout: Collection[str] = ()) -> dict[str, str]:
    """Remove layout conversions from an optimised graph, in place; its outputs become what is fetched for `names`.

    Returns:
        For each of `names`, but those of `keep_layout`, whose values can be had in the blocked layout, the name of the
        blocked tensor. Nothing is changed where there is none.
    """
    values = GraphIndex(model).values
    wanted = set(names) - set(keep_layout)
    _unwrap_clips(model.graph)
    blocked: dict[str, ir.Value] = {}
    found: set[ir.Value] = set()
    for node in model.graph:
        name, source = name_of(node.outputs[0]), node_input(node, 0)
        if name not in wanted or source is None:
            continue
        if _converts_back(node):
            blocked[name] = source
        # A Clip that works on blocked tensors now gives one itself.
        elif is_op(node, "Clip") and source in found:
            blocked[name] = node.outputs[0]
        else:
            continue
        found.add(blocked[name])
    if blocked:
        outputs = dict.fromkeys(blocked.get(name, values[name]) for name in names)
        for value in outputs:  # the file has the shapes of the plain layout
            value.shape = value.type = None
        model.graph.outputs[:] = list(outputs)
        for node in model.graph:
            if _converts_back(node) and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
                model.graph.remove(node, safe=True)
    return {name: name_of(value) for name, value in blocked.items()}


def _unwrap_clips(graph: ir.Graph) -> None:
    """Turn blocked → plain → Clip → blocked into blocked → Clip, where nothing else reads the plain Clip."""
    for node in graph:
        source = node.inputs[0].producer() if is_op(node, "Clip") and node.inputs[0] is not None else None
        clipped = node.outputs[0]
        after = [use.node for use in clipped.uses()]
        if source is None or not _converts_back(source) or not after or clipped.is_graph_output():
            continue
        if all(_converts_to_blocked(reader) for reader in after):
            node.replace_input_with(0, source.inputs[0])
            clipped.shape = clipped.type = None
            for reader in after:
                reader.outputs[0].replace_all_uses_with(clipped)
                graph.remove(reader, safe=True)


def _converts_back(node: ir.Node) -> bool:
    """Blocked to plain, with blocks that are full."""
    return (
        (node.domain, node.op_type) == (_BLOCKED, "ReorderOutput")
        and node.attributes.get_int("channels", 1) % _WIDEST_BLOCK == 0
        and not node.attributes.get_int("channels_last", 0)
    )


def _converts_to_blocked(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (_BLOCKED, "ReorderInput") and not node.attributes.get_int("channels_last", 0)
