"""A session of a float model that gives the tensors under observation, at the least cost.

ONNX Runtime computes convolutions in a blocked channel layout where the CPU gains from it. Asked for a tensor in the
middle, it converts that to the plain layout; for Clip, which it has only in the plain layout, there and back. Counting
values does not care about their order. So the optimised graph is written out once, and the conversions that only serve
the observation are taken off; what is fetched then is the blocked tensor itself. Tensors whose channels do not fill the
blocks keep their conversion, because the padding is no data.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.errors import DataError
from edgeq.model.tensors import weight_bytes
from edgeq.session import SessionSettings, open_session

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
        graph: the model; `path` is where it was read from, for its external data.
        names: tensors produced by nodes.
        keep_layout: those of `names` that are wanted in their own layout, not just with all their values.
        threads: threads inside an operator.
    """

    def __init__(
        self,
        graph: ir.Model,
        path: Path,
        names: Sequence[str],
        *,
        keep_layout: Collection[str] = (),
        threads: int = 0,
    ) -> None:
        self.names = tuple(names)
        settings = SessionSettings(
            config={"session.model_external_initializers_file_folder_path": os.fspath(path.absolute().parent)},
            intra_op_threads=threads,
        )
        content = _with_outputs(graph, path, names)
        self._fetched = list(names)
        if weight_bytes(graph) > _LARGEST or not any(node.op_type == "Conv" for node in graph.graph):
            self._session = open_session(content, settings)
            return
        with tempfile.TemporaryDirectory(prefix="edgeq-calibrate-", ignore_cleanup_errors=True) as folder:
            written = Path(folder) / "optimised.onnx"
            beside = {**settings.config, **_WEIGHTS_BESIDE}
            self._session = open_session(content, replace(settings, config=beside, save_optimized_to=written))
            optimised = onnx.load(written, load_external_data=False)
            blocked = without_conversions(optimised, set(names) - set(keep_layout))
            if blocked:
                self._fetched = [blocked.get(name, name) for name in names]
                del optimised.graph.output[:]
                optimised.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(self._fetched))
                written.write_bytes(optimised.SerializeToString())
                del self._session
                self._session = open_session(written, SessionSettings(optimization="none", intra_op_threads=threads))

    def floats(self) -> frozenset[str]:
        """Those of the names that are float32 or float16 tensors, as ONNX Runtime has it."""
        kinds = {output.name: output.type for output in self._session.get_outputs()}
        return frozenset(n for n, fetched in zip(self.names, self._fetched, strict=True) if kinds[fetched] in _FLOATS)

    def run(self, inputs: Mapping[str, NDArray[Any]], sample: str) -> list[NDArray[Any]]:
        """The tensors for one sample, whose name is for the message.

        Raises:
            DataError: ONNX Runtime refuses the sample.
        """
        try:
            values: list[NDArray[Any]] = self._session.run(self._fetched, dict(inputs))
        except Exception as error:  # onnxruntime raises unrelated types, some of them bare Exception
            text = " ".join(str(error).split())
            raise DataError(f"onnxruntime cannot run sample {sample}: {text}", "Check its names and shapes") from error
        return values


def without_conversions(model: onnx.ModelProto, wanted: Collection[str]) -> dict[str, str]:
    """Take layout conversions off an optimised graph, in place.

    Returns:
        For each of `wanted` whose values can be had in the blocked layout, the name of the blocked tensor.
    """
    graph = model.graph
    _unwrap_clips(graph)
    readers = _readers(graph)
    blocked: dict[str, str] = {}
    kept = []
    for node in graph.node:
        if _converts_back(node) and node.output[0] in wanted:
            blocked[node.output[0]] = node.input[0]
            if not readers.get(node.output[0]):
                continue
        kept.append(node)
    # A Clip that now works on blocked tensors gives one itself.
    for node in kept:
        if node.op_type == "Clip" and node.output[0] in wanted and node.input[0] in blocked.values():
            blocked[node.output[0]] = node.output[0]
    del graph.node[:]
    graph.node.extend(kept)
    return blocked


def _unwrap_clips(graph: onnx.GraphProto) -> None:
    """Turn blocked → plain → Clip → blocked into blocked → Clip, where nobody reads the plain Clip."""
    producers = {node.output[0]: node for node in graph.node if node.output}
    readers = _readers(graph)
    outputs = {o.name for o in graph.output}
    replaced: dict[str, str] = {}
    gone: set[int] = set()
    for node in graph.node:
        source = producers.get(node.input[0]) if node.op_type == "Clip" and node.input else None
        after = readers.get(node.output[0], []) if node.output else []
        if source is None or not _converts_back(source) or not after or node.output[0] in outputs:
            continue
        if all(_converts_to_blocked(reader) for reader in after):
            node.input[0] = source.input[0]
            replaced.update({reader.output[0]: node.output[0] for reader in after})
            gone.update(id(reader) for reader in after)
    kept = [node for node in graph.node if id(node) not in gone]
    for node in kept:
        for place, name in enumerate(node.input):
            if name in replaced:
                node.input[place] = replaced[name]
    for value in [v for v in graph.value_info if v.name in set(replaced.values())]:
        graph.value_info.remove(value)
    del graph.node[:]
    graph.node.extend(kept)


def _converts_back(node: onnx.NodeProto) -> bool:
    """Blocked to plain, with blocks that are full."""
    attributes = {a.name: a.i for a in node.attribute}
    return (
        node.domain == _BLOCKED
        and node.op_type == "ReorderOutput"
        and attributes.get("channels", 1) % _WIDEST_BLOCK == 0
        and not attributes.get("channels_last", 0)
    )


def _converts_to_blocked(node: onnx.NodeProto) -> bool:
    plain = all(a.name != "channels_last" or a.i == 0 for a in node.attribute)
    return node.domain == _BLOCKED and node.op_type == "ReorderInput" and plain


def _readers(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers


def _with_outputs(graph: ir.Model, path: Path, names: Sequence[str]) -> bytes:
    """The model file with more outputs. Serialized messages merge when joined, so the weights are not parsed for it."""
    outputs = {value.name for value in graph.graph.outputs}
    more = onnx.ModelProto()
    more.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        joined: bytes = b"".join([whole, more.SerializeToString()])
    return joined
