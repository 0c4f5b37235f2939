"""SmoothQuant: outlier channels of a product's input made smaller, and the rows of its matrix that read them larger.

X W = (X / k) (k W) for any positive k per input channel. Activations get one scale for a whole tensor, so a channel
ten times as large as the others leaves those a tenth of the levels; weights have a scale per output and bear it better.

    k[c] = max |X[:, c]| ** alpha / max |W[c, :]| ** (1 - alpha)        (Xiao et al. 2023, equation 4)

Alpha is chosen per input by what it does to the product: the product of quantized factors against the exact one, on
rows of real activations. The division goes into a LayerNormalization where that feeds nothing else, else into a Mul of
its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgeq.calibrate.instrumented import InstrumentedModel
from edgeq.data.samples import Samples
from edgeq.graph.convert import from_proto
from edgeq.model.load import load_model, model_digest, read_model, save_model
from edgeq.model.prepare import PreparedModel
from edgeq.progress import SILENT, Progress
from edgeq.tune.recover.base import Recovery, Stage, State

ALPHAS = (0.5, 0.65, 0.8, 0.95)
LEAST_GAIN_DB = 1.0
"""Below this a Mul more is not worth its time."""
MOST_SAMPLES = 64
ROWS = 256
"""Rows of each input that alpha is judged on, from all samples alike."""
_COLUMNS = 512
Floats = NDArray[np.float32]


class SmoothQuant(Recovery):
    name = "smoothquant"
    title = "outlier channels of matrix products moved into the weights"
    stage: Stage = "model"
    free = False
    order = 20
    searched = False

    def apply(self, state: State, samples: Samples, workdir: Path, progress: Progress) -> State:
        """See `Recovery.apply`. Statistics and ranges of `state` are of the old model afterwards."""
        prepared, changed = smooth(
            state.prepared,
            samples,
            workdir / "smoothed.onnx",
            symmetric=state.scheme.activation_symmetric,
            exclude=state.scheme.exclude,
            progress=progress,
        )
        if not changed:
            return state.note(f"{self.name}: no product of constant matrices gains by it")
        groups = product_groups(load_model(state.prepared.path, external_data="none"))
        nodes = {name for group in groups if group.tensor in changed for name, *_ in group.products}
        return state.replace(prepared=prepared, changed=state.changed | nodes).note(
            f"{self.name}: {len(changed)} inputs of matrix products scaled"
        )


@dataclass(frozen=True)
class Group:
    """Products that read one tensor: they share its scaling.

    Attributes:
        tensor: what they read, [..., channels].
        products: (node name, weight name, whether the weight is [outputs, channels]).
    """

    tensor: str
    products: tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True)
class Observed:
    """Of one tensor: the largest magnitude per channel, and rows [rows, channels] to try things on."""

    largest: Floats
    rows: Floats


def smooth(
    prepared: PreparedModel,
    samples: Samples,
    destination: Path,
    *,
    symmetric: bool = False,
    exclude: Collection[str] = (),
    progress: Progress = SILENT,
) -> tuple[PreparedModel, tuple[str, ...]]:
    """Write the smoothed model, which computes what `prepared` does; the prepared model it makes, and the tensors
    that were smoothed. Nothing is written where no product gains.

    Args:
        symmetric: whether activations will be quantized around zero.
        exclude: names of nodes that stay in float and are left alone.
    """
    model = load_model(prepared.path, external_data="all")
    groups = product_groups(model, exclude)
    if not groups:
        return prepared, ()
    seen = observe(model, prepared.path, groups, samples, progress)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    factors: dict[str, Floats] = {}
    with progress.stage("Smoothing", len(groups)) as advance:
        for group in groups:
            matrix = np.concatenate([_matrix(weights, weight, flip) for _, weight, flip in group.products], axis=1)
            factor = best_factor(seen[group.tensor], matrix, symmetric=symmetric)
            if factor is not None:
                factors[group.tensor] = factor
            advance(1)
    if not factors:
        return prepared, ()
    rescale(model, [g for g in groups if g.tensor in factors], factors)
    save_model(model, destination)
    smoothed = dataclasses.replace(
        prepared,
        model=read_model(destination),
        path=destination,
        digest=model_digest(destination),
        notes=(*prepared.notes, f"SmoothQuant on {len(factors)} inputs of matrix products"),
    )
    return smoothed, tuple(factors)


def product_groups(model: onnx.ModelProto, exclude: Collection[str] = ()) -> tuple[Group, ...]:
    """MatMul, Gemm and fused Attention nodes of the main graph with a constant matrix, by the computed tensor that they
    multiply."""
    constants = {t.name: t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    found: dict[str, list[tuple[str, str, bool]]] = {}
    for node in model.graph.node:
        fused = node.op_type == "Attention" and node.domain == "com.microsoft"
        if not (fused or node.op_type in ("MatMul", "Gemm")) or node.name in exclude:
            continue
        x, weight = node.input[:2]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        matrix = weight in constants and len(constants[weight].dims) == 2
        if matrix and x not in constants and not attributes.get("transA", 0):
            found.setdefault(x, []).append((node.name, weight, bool(attributes.get("transB", 0))))
    return tuple(Group(tensor, tuple(products)) for tensor, products in found.items())


def observe(
    model: onnx.ModelProto, path: Path, groups: Sequence[Group], samples: Samples, progress: Progress
) -> dict[str, Observed]:
    """What the groups' tensors held over at most `MOST_SAMPLES` samples, spread over all of them."""
    inputs = {value.name for value in model.graph.input}
    names = [group.tensor for group in groups]
    fetched = [name for name in names if name not in inputs]
    session = InstrumentedModel(from_proto(model, path.parent), fetched, keep_layout=fetched)
    stride = max(1, len(samples) // MOST_SAMPLES)
    chosen = range(0, len(samples), stride)[:MOST_SAMPLES]
    each = -(-ROWS // len(chosen))
    largest: dict[str, Floats] = {}
    rows: dict[str, list[Floats]] = {name: [] for name in names}
    with progress.stage("Looking at the inputs of matrix products", len(chosen)) as advance:
        for index, sample in enumerate(samples):
            if index not in chosen:
                continue
            values = dict(zip(fetched, session.run(sample.inputs, sample.name), strict=True)) if fetched else {}
            for name in names:
                table = np.asarray(values.get(name, sample.inputs.get(name)), np.float32)
                table = table.reshape(-1, table.shape[-1])
                peak = np.abs(table).max(axis=0, initial=0)
                largest[name] = np.maximum(largest[name], peak) if name in largest else peak
                rows[name].append(table[:: max(1, len(table) // each)][:each].copy())
            advance(1)
    return {name: Observed(largest[name], np.concatenate(rows[name])) for name in names}


def best_factor(seen: Observed, matrix: Floats, *, symmetric: bool) -> Floats | None:
    """k per channel that makes the product [rows, outputs] most exact; None where none gains `LEAST_GAIN_DB`."""
    columns = matrix[:, :: max(1, matrix.shape[1] // _COLUMNS)]
    exact = seen.rows @ columns
    plain = _noise(seen.rows, columns, exact, symmetric)
    noise, best = min(
        ((_noise(seen.rows / k, columns * k[:, None], exact, symmetric), k) for k in _factors(seen.largest, matrix)),
        key=lambda pair: pair[0],
    )
    return best if noise * 10 ** (LEAST_GAIN_DB / 10) < plain else None


def _factors(largest: Floats, matrix: Floats) -> Iterator[Floats]:
    peaks = np.abs(matrix).max(axis=1)
    used = (largest > 0) & (peaks > 0)
    for alpha in ALPHAS:
        k = np.ones(len(largest), np.float64)
        k[used] = largest[used].astype(np.float64) ** alpha / peaks[used].astype(np.float64) ** (1 - alpha)
        # Only ratios between channels matter; around one, nothing over- or underflows.
        k[used] /= np.exp(np.log(k[used]).mean()) if used.any() else 1.0
        yield k.astype(np.float32)


def _noise(rows: Floats, matrix: Floats, exact: Floats, symmetric: bool) -> float:
    """Power of the error of a product with rows in 8 bits (one scale) and the matrix in 8 bits (one per column)."""
    low, high = min(float(rows.min()), 0.0), max(float(rows.max()), 0.0)
    step = (2 * max(-low, high) if symmetric else high - low) / 255 or 1.0
    scale = np.abs(matrix).max(axis=0)
    scale = np.where(scale > 0, scale, 1) / np.float32(127)
    made = (np.rint(rows / np.float32(step)) * np.float32(step)) @ (np.rint(matrix / scale) * scale)
    error = (made - exact).astype(np.float64)
    return float(np.einsum("ij,ij->", error, error))


def rescale(model: onnx.ModelProto, groups: Sequence[Group], factors: Mapping[str, Floats]) -> None:
    """Divide each group's tensor by its factor and multiply its matrices, in place."""
    graph = model.graph
    editor = _Editor(graph)
    for group in groups:
        k = factors[group.tensor]
        nodes = {name: editor.nodes[name] for name, _, _ in group.products}
        normalization = editor.makers.get(group.tensor)
        if normalization is not None and editor.only_feeds(normalization, nodes):
            for place in (1, 2):
                if len(normalization.input) > place and normalization.input[place]:
                    name = normalization.input[place]
                    normalization.input[place] = editor.changed(name, editor.array(name) / k)
        else:
            smoothed, inverse = f"{group.tensor}/smoothed", f"{group.tensor}/smoothing"
            graph.initializer.append(numpy_helper.from_array(1 / k, inverse))
            first = next(i for i, node in enumerate(graph.node) if node.name in nodes)
            graph.node.insert(first, helper.make_node("Mul", [group.tensor, inverse], [smoothed], name=smoothed))
            editor.describe_as(group.tensor, smoothed)
            for node in graph.node:
                if node.name in nodes:
                    node.input[0] = smoothed
        for name, weight, flip in group.products:
            scaled = editor.array(weight) * (k[None, :] if flip else k[:, None])
            node = next(node for node in graph.node if node.name == name)
            node.input[1] = editor.changed(weight, scaled)
    editor.drop_unused()


class _Editor:
    """Constants changed in place where one node reads them, else as copies."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._uses: dict[str, list[str]] = {}
        for node in graph.node:
            for name in node.input:
                self._uses.setdefault(name, []).append(node.name)
        self._outputs = {output.name for output in graph.output}
        self.nodes = {node.name: node for node in graph.node}
        self.makers = {name: node for node in graph.node for name in node.output}

    def array(self, name: str) -> NDArray[Any]:
        return numpy_helper.to_array(self._constants[name])

    def only_feeds(self, node: onnx.NodeProto, readers: Collection[str]) -> bool:
        """Whether `node` is a LayerNormalization over the last axis with constants, read by nobody but `readers`."""
        output = node.output[0]
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
        constant = all(name in self._constants for name in node.input[1:] if name)
        alone = output not in self._outputs and set(self._uses.get(output, ())) <= set(readers)
        return node.op_type == "LayerNormalization" and axis == -1 and constant and alone

    def changed(self, name: str, values: NDArray[Any]) -> str:
        """The name under which a constant has these values for one of its readers."""
        tensor = numpy_helper.from_array(np.ascontiguousarray(values, np.float32), name)
        if len(self._uses[name]) == 1:
            self._constants[name].CopyFrom(tensor)
            return name
        self._uses[name].pop()
        number = 1
        while f"{name}/scaled{number}" in self._constants:
            number += 1
        tensor.name = f"{name}/scaled{number}"
        self._graph.initializer.append(tensor)
        self._constants[tensor.name] = tensor
        return tensor.name

    def describe_as(self, tensor: str, new: str) -> None:
        for value in [*self._graph.value_info, *self._graph.input, *self._graph.output]:
            if value.name == tensor:
                self._graph.value_info.add().CopyFrom(value)
                self._graph.value_info[-1].name = new
                return

    def drop_unused(self) -> None:
        used = {name for node in self._graph.node for name in node.input} | self._outputs
        kept = [tensor for tensor in self._graph.initializer if tensor.name in used]
        if len(kept) < len(self._graph.initializer):
            del self._graph.initializer[:]
            self._graph.initializer.extend(kept)


def _matrix(weights: Mapping[str, onnx.TensorProto], name: str, flip: bool) -> Floats:
    """[channels, outputs]"""
    values: Floats = numpy_helper.to_array(weights[name])
    return values.T if flip else values


RECOVERY = SmoothQuant()
