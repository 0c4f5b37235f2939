"""Apply SmoothQuant: divide outlier channels of a product's input by a factor, and multiply the matrix rows that read
them by it.

For any positive k per input channel, X W = (X / k) (k W). Activations have one scale for a whole tensor, so a channel
ten times as large as the others leaves them a tenth of the levels. Weights have a scale per output, so outliers cost
them less.

    k[c] = max |X[:, c]| ** alpha / max |W[c, :]| ** (1 - alpha)        (Xiao et al. 2023, equation 4)

For each input, alpha is chosen for the least error of the quantized product, on rows of real activations. The division
is folded into a LayerNormalization if nothing else reads its output. Otherwise the division becomes a Mul.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.calibration.sampled_values import tensor_values
from edgeq.data.samples import Samples
from edgeq.model.edit import Editor, set_constant
from edgeq.model.graph import MICROSOFT, GraphIndex, constant, is_op, name_of, node_input, read_count, readers
from edgeq.model.prepare import PreparedModel, save_rewritten
from edgeq.tuning.recover.base import Recovery, RecoveryState, Stage
from edgeq.tuning.recover.layers import initializer
from edgeq.util.display import SILENT, Progress

ALPHAS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
MIN_GAIN_DB = 1.0
"""A smaller gain is not worth the time of another Mul."""
# Each sample costs a run of the float model.
MAX_SAMPLES = 64
ROWS = 256
"""Number of rows of each input on which alpha is chosen. Each sample gives the same number of rows."""
# With more outputs, every alpha would take longer to try.
_COLUMNS = 512
Floats = NDArray[np.float32]


class SmoothQuant(Recovery):
    """Move outlier channels of matrix products into the weights. Tuning tries this only in candidates that are made for
    it.
    """

    name = "smoothquant"
    title = "outlier channels of matrix products moved into the weights"
    stage: Stage = "model"
    free = False
    order = 20
    searched = False

    def apply(self, state: RecoveryState, samples: Samples, workdir: Path, progress: Progress) -> RecoveryState:
        """See `Recovery.apply`. The new state still has the statistics and ranges of the old model."""
        prepared, changed = smooth(
            state.prepared,
            samples,
            workdir / "smoothed.onnx",
            symmetric=state.scheme.activation_symmetric,
            exclude=state.scheme.exclude,
            progress=progress,
        )
        if not changed:
            return state.note(f"{self.name}: no product with a constant matrix gains from it")
        # Name the products of the model before the change, because users exclude nodes by these names.
        groups = find_product_groups(state.prepared.model)
        nodes = {name for group in groups if group.tensor in changed for name in group.products}
        return state.replace(prepared=prepared, changed=state.changed | nodes).note(
            f"{self.name}: {len(changed)} inputs of matrix products scaled"
        )


@dataclass(frozen=True)
class ProductGroup:
    """Describe products that read the same tensor, and therefore share its scaling.

    Attributes:
        tensor: name of the tensor that they read, [..., channels].
        products: names of the nodes.
    """

    tensor: str
    products: tuple[str, ...]


@dataclass(frozen=True)
class ObservedInput:
    """Hold figures of one tensor: the range of each channel, always with zero in it, and rows [rows, channels] on which
    factors are evaluated.

    The rows are only part of the values that the range covers. Rare tokens may make the range far wider than the rows.
    """

    low: Floats
    high: Floats
    rows: Floats

    @property
    def largest(self) -> Floats:
        """Return the largest magnitude per channel."""
        return np.maximum(-self.low, self.high)

    def step(self, k: Floats, *, symmetric: bool) -> float:
        """Return the quantization step of the tensor in 8 bits, after its channels are divided by `k`."""
        low, high = float((self.low / k).min(initial=0)), float((self.high / k).max(initial=0))
        return (2 * max(-low, high) if symmetric else high - low) / 255 or 1.0


def smooth(
    prepared: PreparedModel,
    samples: Samples,
    destination: Path,
    *,
    symmetric: bool = False,
    exclude: Collection[str] = (),
    progress: Progress = SILENT,
) -> tuple[PreparedModel, tuple[str, ...]]:
    """Write the smoothed model, which computes the same as `prepared`.

    Args:
        symmetric: whether activations will be quantized around zero.
        exclude: names of nodes that stay in float and are left alone.

    Returns:
        (the smoothed prepared model, names of the tensors that were smoothed). If no product gains, nothing is written,
            and the result is `prepared` and no names.

    Raises:
        DataError: ONNX Runtime refuses a sample.
    """
    groups = find_product_groups(prepared.model, exclude)
    if not groups:
        return prepared, ()
    figures = observe(prepared, groups, samples, progress)
    nodes = GraphIndex(prepared.model).nodes
    factors: dict[str, Floats] = {}
    with progress.stage("Smoothing", len(groups)) as advance:
        for group in groups:
            # Products that read one tensor share its factor, so their matrices are judged as one.
            matrix = np.concatenate([_matrix(nodes[name]) for name in group.products], axis=1)
            factor = find_best_factor(figures[group.tensor], matrix, symmetric=symmetric)
            if factor is not None:
                factors[group.tensor] = factor
            advance(1)
    if not factors:
        return prepared, ()
    model = prepared.model.clone()
    rescale(model, [g for g in groups if g.tensor in factors], factors)
    note = f"SmoothQuant on {len(factors)} inputs of matrix products"
    return save_rewritten(prepared, model, destination, note), tuple(factors)


def find_product_groups(model: ir.Model, exclude: Collection[str] = ()) -> tuple[ProductGroup, ...]:
    """Return the MatMul, Gemm and fused Attention nodes of the main graph that have a constant matrix. They are grouped
    by the tensor that they multiply with the matrix.

    Args:
        exclude: names of nodes to leave out.
    """
    products_by_tensor: dict[str, list[str]] = {}
    for node in model.graph:
        # A fused Attention reads a constant matrix like a product, and its input has outliers as well.
        fused = node.op_type == "Attention" and node.domain == MICROSOFT
        if not (fused or is_op(node, "MatMul", "Gemm")) or node.name in exclude:
            continue
        x, weight = node.inputs[0], initializer(node.inputs[1])
        matrix = weight is not None and weight.dtype == ir.DataType.FLOAT and len(weight.shape) == 2
        if matrix and initializer(x) is None and not node.attributes.get_int("transA", 0):
            products_by_tensor.setdefault(name_of(x), []).append(node.name or "")
    return tuple(ProductGroup(tensor, tuple(products)) for tensor, products in products_by_tensor.items())


def observe(
    prepared: PreparedModel, groups: Sequence[ProductGroup], samples: Samples, progress: Progress
) -> dict[str, ObservedInput]:
    """Return the values of the groups' tensors on at most `MAX_SAMPLES` samples, spread evenly over all samples."""
    names = [group.tensor for group in groups]
    stride = max(1, len(samples) // MAX_SAMPLES)
    picks = range(0, len(samples), stride)[:MAX_SAMPLES]
    row_count = -(-ROWS // len(picks))
    ranges: dict[str, tuple[Floats, Floats]] = {}
    rows: dict[str, list[Floats]] = {name: [] for name in names}
    subset = (sample for index, sample in enumerate(samples) if index in picks)
    with progress.stage("Observing the inputs of matrix products", len(picks)) as advance:
        for values in tensor_values(prepared, names, subset):
            for name in names:
                table = np.asarray(values[name], np.float32)
                table = table.reshape(-1, table.shape[-1])
                low, high = table.min(axis=0, initial=0), table.max(axis=0, initial=0)
                lowest, highest = ranges.get(name, (low, high))
                ranges[name] = np.minimum(low, lowest), np.maximum(high, highest)
                rows[name].append(table[:: max(1, len(table) // row_count)][:row_count].copy())
            advance(1)
    return {name: ObservedInput(*ranges[name], np.concatenate(rows[name])) for name in names}


def find_best_factor(figures: ObservedInput, matrix: Floats, *, symmetric: bool) -> Floats | None:
    """Return the k, float32 [channels], with the least error of the product; None if no k gains `MIN_GAIN_DB`.

    Args:
        matrix: [channels, outputs].
        symmetric: whether activations will be quantized around zero.
    """
    # Every n-th column instead of the first ones, so that all parts of the matrix count.
    columns = matrix[:, :: max(1, matrix.shape[1] // _COLUMNS)]
    exact = figures.rows @ columns

    def noise_of(k: Floats) -> float:
        return _noise(figures.rows / k, columns * k[:, None], exact, figures.step(k, symmetric=symmetric))

    unscaled_noise = noise_of(np.ones_like(figures.high))
    noise, best = min(((noise_of(k), k) for k in _factors(figures.largest, matrix)), key=lambda pair: pair[0])
    return best if noise * 10 ** (MIN_GAIN_DB / 10) < unscaled_noise else None


def _factors(largest: Floats, matrix: Floats) -> Iterator[Floats]:
    peaks = np.abs(matrix).max(axis=1)
    used = (largest > 0) & (peaks > 0)
    for alpha in ALPHAS:
        k = np.ones(len(largest), np.float64)
        k[used] = largest[used].astype(np.float64) ** alpha / peaks[used].astype(np.float64) ** (1 - alpha)
        # Only the ratios between channels matter. With values around one, nothing overflows or underflows.
        k[used] /= np.exp(np.log(k[used]).mean()) if used.any() else 1.0
        yield k.astype(np.float32)


def _noise(rows: Floats, matrix: Floats, exact: Floats, step: float) -> float:
    """Return the summed squared error of a product whose rows are in 8 bits (one scale) and whose matrix is in 8 bits
    (one scale per column).
    """
    scale = np.abs(matrix).max(axis=0)
    scale = np.where(scale > 0, scale, 1) / np.float32(127)
    product = (np.rint(rows / np.float32(step)) * np.float32(step)) @ (np.rint(matrix / scale) * scale)
    error = (product - exact).astype(np.float64)
    return float(np.einsum("ij,ij->", error, error))


def rescale(model: ir.Model, groups: Sequence[ProductGroup], factors: Mapping[str, Floats]) -> None:
    """Divide each group's tensor by its factor, and multiply the matrices that read it by the factor, in place.

    Args:
        factors: factors by tensor, float32 [channels].
    """
    index, editor = GraphIndex(model), Editor(model)
    for group in groups:
        k, x = factors[group.tensor], index.values[group.tensor]
        nodes = [index.nodes[name] for name in group.products]
        normalization = x.producer()
        # Fold the division into the normalization's own weights, so that it costs nothing at run time.
        if normalization is not None and _feeds_only(normalization, nodes):
            for place in (1, 2):
                weights = constant(node_input(normalization, place))
                if weights is not None:
                    _replace_weight(editor, normalization, place, weights / k)
        else:
            inverse = editor.constant(f"{group.tensor}/smoothing", 1 / k)
            smoothed = editor.node("Mul", [x, inverse], f"{group.tensor}/smoothed", before=nodes[0], like=x)
            for node in nodes:
                node.replace_input_with(0, smoothed)
        for node in nodes:
            weights = constant(node.inputs[1])
            assert weights is not None
            _replace_weight(editor, node, 1, weights * (k[None, :] if _is_transposed(node) else k[:, None]))


def _feeds_only(node: ir.Node, nodes: Collection[ir.Node]) -> bool:
    """Return whether `node` is a LayerNormalization over the last axis that has constant parameters and that only
    `nodes` nodes read.
    """
    output = node.outputs[0]
    constants = all(value is None or initializer(value) is not None for value in node.inputs[1:])
    alone = not output.is_graph_output() and set(readers(output)) <= set(nodes)
    last_axis = node.attributes.get_int("axis", -1) == -1
    return node.op_type == "LayerNormalization" and last_axis and constants and alone


def _replace_weight(editor: Editor, node: ir.Node, place: int, values: NDArray[Any]) -> None:
    """Replace a weight (float32) of a node: in place if only this node reads it, else by a new constant."""
    weights = node.inputs[place]
    assert weights is not None
    if read_count(weights) == 1:
        set_constant(weights, values)
    else:
        copy = editor.constant(f"{weights.name}/scaled", np.asarray(values, np.float32))
        node.replace_input_with(place, copy)


def _is_transposed(node: ir.Node) -> bool:
    """Return whether a product's matrix is stored as [outputs, channels]."""
    return bool(node.attributes.get_int("transB", 0))


def _matrix(node: ir.Node) -> Floats:
    """Return the matrix of a product as [channels, outputs]."""
    values = constant(node.inputs[1])
    assert values is not None
    return values.T if _is_transposed(node) else values


RECOVERY = SmoothQuant()
