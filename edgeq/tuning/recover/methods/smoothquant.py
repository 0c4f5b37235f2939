"""Apply SmoothQuant: divide outlier channels of a product's input by a factor, and multiply the matrix rows that read
them by it.

For any positive k per input channel, X W = (X / k) (k W). Activations have one scale for a whole tensor, so a channel
ten times as large as the others leaves them a tenth of the levels. Weights have a scale per output, so outliers cost
them less.

    k[c] = max |X[:, c]| ** alpha / max |W[c, :]| ** (1 - alpha)        (Xiao et al. 2023, equation 4)

For each input, alpha is chosen for the least error of the quantized product, on rows of real activations. So no build
is needed to choose. A large alpha gives all channels one magnitude, and then any channel may exceed the range on other
samples. So the factor and the range come from one half of the samples, and the error from the other half.

The division costs nothing where constants can take it up (`edgeq.tuning.recover.channel_folds`). Otherwise the division
becomes a Mul in front of the products.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.calibration.sampled_values import real_rows, spread, tensor_values
from edgeq.data.samples import Samples
from edgeq.model.edit import Editor
from edgeq.model.graph import MICROSOFT, GraphIndex, constant, is_op, name_of
from edgeq.model.prepare import PreparedModel, save_rewritten
from edgeq.quantization.params import weight_limits
from edgeq.scheme import Scheme
from edgeq.tuning.recover.base import Recovery, RecoveryState, Stage
from edgeq.tuning.recover.channel_folds import ChannelFold, find_fold, replace_weight
from edgeq.tuning.recover.layers import initializer
from edgeq.util.display import SILENT, Progress

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
MIN_GAIN_DB = 1.0
"""A smaller gain is not worth the time of another Mul."""
# Each sample costs a run of the float model.
MAX_SAMPLES = 128
ROWS = 1024
"""Number of rows of each input on which alpha is chosen. Each sample gives the same number of rows."""
# With more outputs, every alpha would take longer to try.
_COLUMNS = 256
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
        smoothed = smooth(
            state.prepared,
            samples,
            workdir / "smoothed.onnx",
            state.scheme,
            progress=progress,
        )
        if not smoothed.factors:
            return state.note(f"{self.name}: no product with a constant matrix gains from it")
        # Name the products of the model before the change, because users exclude nodes by these names.
        groups = find_product_groups(state.prepared.model)
        nodes = {name for group in groups if group.tensor in smoothed.factors for name in group.products}
        count, folded = len(smoothed.factors), len(smoothed.folded)
        return state.replace(prepared=smoothed.prepared, changed=state.changed | nodes).note(
            f"{self.name}: {count} inputs of matrix products scaled, {folded} of them without another node"
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
    """Hold figures of one tensor on some samples: the range of each channel, always with zero in it, and rows [rows,
    channels].

    The rows are only part of the values that the range covers. Rare tokens may make the range far wider than the rows.
    """

    low: Floats
    high: Floats
    rows: Floats

    @property
    def largest(self) -> Floats:
        """Return the largest magnitude per channel."""
        return np.maximum(-self.low, self.high)

    def round(self, rows: Floats, k: Floats, *, symmetric: bool) -> Floats:
        """Return other rows, divided by `k`, as 8 bits represent them in this tensor's range."""
        low, high = float((self.low / k).min(initial=0)), float((self.high / k).max(initial=0))
        if symmetric:
            low, high = -max(-low, high), max(-low, high)
        step = np.float32((high - low) / 255 or 1.0)
        steps = np.rint(rows / (k * step))
        return np.clip(steps, np.rint(low / step), np.rint(high / step), out=steps) * step


@dataclass(frozen=True)
class SmoothedModel:
    """Hold a smoothed model.

    Attributes:
        prepared: the model, which computes the same as before.
        factors: factors by the tensors that products read, float32 [channels]. Products now read these tensors divided
            by the factors.
        folded: tensor of `factors` → every tensor that is divided in the graph, each with factors that broadcast to its
            shape. The other tensors of `factors` stay as they are, and a Mul divides them for the products.
    """

    prepared: PreparedModel
    factors: Mapping[str, Floats] = field(default_factory=dict)
    folded: Mapping[str, Mapping[str, NDArray[Any]]] = field(default_factory=dict)


def smooth(
    prepared: PreparedModel,
    samples: Samples,
    destination: Path,
    scheme: Scheme,
    *,
    progress: Progress = SILENT,
) -> SmoothedModel:
    """Write the smoothed model, which computes the same as `prepared`.

    Args:
        scheme: how the model will be quantized. Nodes that it keeps in float are left alone.

    Returns:
        The smoothed model. If no product gains, nothing is written, and the result is `prepared` without factors.

    Raises:
        DataError: ONNX Runtime refuses a sample.
    """
    groups = find_product_groups(prepared.model, scheme.exclude)
    if not groups:
        return SmoothedModel(prepared)
    figures = observe(prepared, groups, samples, progress)
    index = prepared.graph
    factors: dict[str, Floats] = {}
    with progress.stage("Smoothing", len(groups)) as advance:
        for group in groups:
            # Products that read one tensor share its factor, so their matrices are judged as one.
            matrix = np.concatenate([_matrix(index.nodes[name]) for name in group.products], axis=1)
            # A division that costs nothing is worth any gain.
            is_free = _find_group_fold(index, group, np.ones(len(matrix), np.float32)) is not None
            factor = find_best_factor(figures[group.tensor], matrix, scheme, 0.0 if is_free else MIN_GAIN_DB)
            if factor is not None:
                factors[group.tensor] = factor
            advance(1)
    if not factors:
        return SmoothedModel(prepared)
    model = prepared.model.clone()
    folded = rescale(model, [g for g in groups if g.tensor in factors], factors)
    note = f"SmoothQuant on {len(factors)} inputs of matrix products"
    return SmoothedModel(save_rewritten(prepared, model, destination, note), factors, folded)


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


Halves = tuple[ObservedInput, ObservedInput]
"""Figures of one tensor on every second sample, and on the others."""


def observe(
    prepared: PreparedModel, groups: Sequence[ProductGroup], samples: Samples, progress: Progress
) -> dict[str, Halves]:
    """Return the values of the groups' tensors on at most `MAX_SAMPLES` samples, spread evenly over all samples.
    Positions that a mask hides are left out, because nobody reads what the products compute there.
    """
    names = [group.tensor for group in groups]
    count = min(MAX_SAMPLES, len(samples))
    row_count = -(-ROWS // count)
    parts: dict[str, list[ObservedInput]] = {name: [] for name in names}
    with progress.stage("Observing the inputs of matrix products", count) as advance:
        for values in tensor_values(prepared, names, spread(samples, count)):
            for name in names:
                table = np.asarray(real_rows(prepared.graph, name, values, -1), np.float32)
                low, high = table.min(axis=0, initial=0), table.max(axis=0, initial=0)
                rows = table[:: max(1, len(table) // row_count)][:row_count].copy()
                parts[name].append(ObservedInput(low, high, rows))
            advance(1)
    # A single sample is both halves.
    return {name: (_merge(part[::2]), _merge(part[1::2] or part)) for name, part in parts.items()}


def _merge(parts: Sequence[ObservedInput]) -> ObservedInput:
    low, high = (np.stack([getattr(part, end) for part in parts]) for end in ("low", "high"))
    return ObservedInput(low.min(axis=0), high.max(axis=0), np.concatenate([part.rows for part in parts]))


def find_best_factor(halves: Halves, matrix: Floats, scheme: Scheme, min_gain_db: float = MIN_GAIN_DB) -> Floats | None:
    """Return the k, float32 [channels], with the least error of the product; None if no k gains more than
    `min_gain_db`.

    Args:
        matrix: [channels, outputs].
        scheme: how the product will be quantized.
    """
    # Every n-th column instead of the first ones, so that all parts of the matrix count.
    columns = matrix[:, :: max(1, matrix.shape[1] // _COLUMNS)]
    peaks = np.abs(matrix).max(axis=1)
    exact = [half.rows @ columns for half in halves]

    def noise_of(alpha: float | None) -> float:
        """Return the summed squared error of the quantized product."""
        noise = 0.0
        for seen, unseen, product in zip(halves, reversed(halves), reversed(exact), strict=True):
            k = _factor(seen.largest, peaks, alpha)
            rows = seen.round(unseen.rows, k, symmetric=scheme.activation_symmetric)
            error = (rows @ _round_weights(columns * k[:, None], scheme) - product).astype(np.float64)
            noise += float(np.einsum("ij,ij->", error, error))
        return noise

    noise, best = min(((noise_of(alpha), alpha) for alpha in ALPHAS), key=lambda pair: pair[0])
    if noise * 10 ** (min_gain_db / 10) >= noise_of(None):
        return None
    return _factor(np.maximum(halves[0].largest, halves[1].largest), peaks, best)


def _factor(largest: Floats, peaks: Floats, alpha: float | None) -> Floats:
    """Return k, float32 [channels]; ones for None.

    Args:
        largest, peaks: the largest magnitudes of each channel in the tensor and in the matrix.
    """
    k = np.ones(len(largest), np.float64)
    used = (largest > 0) & (peaks > 0)
    if alpha is not None and used.any():
        k[used] = largest[used].astype(np.float64) ** alpha / peaks[used].astype(np.float64) ** (1 - alpha)
        # Only the ratios between channels matter. With values around one, nothing overflows or underflows.
        k[used] /= np.exp(np.log(k[used]).mean())
    return k.astype(np.float32)


def _round_weights(matrix: Floats, scheme: Scheme) -> Floats:
    """Return the matrix as its 8-bit form represents it, with one scale for each output or one for all."""
    lowest, highest = weight_limits(scheme.weight_type, scheme.reduce_range)
    axis = 0 if scheme.per_channel else None
    if scheme.weight_symmetric:
        reach = 2 * np.abs(matrix).max(axis=axis, keepdims=True)
    else:
        reach = matrix.max(axis=axis, keepdims=True, initial=0) - matrix.min(axis=axis, keepdims=True, initial=0)
    step = np.where(reach > 0, reach / np.float32(highest - lowest), np.float32(1))
    return np.rint(matrix / step) * step


def rescale(
    model: ir.Model, groups: Sequence[ProductGroup], factors: Mapping[str, Floats]
) -> dict[str, Mapping[str, NDArray[Any]]]:
    """Divide each group's tensor by its factor, and multiply the matrices that read it by the factor, in place.

    Args:
        factors: factors by tensor, float32 [channels].

    Returns:
        See `SmoothedModel.folded`.
    """
    index, editor = GraphIndex(model), Editor(model)
    folded: dict[str, Mapping[str, NDArray[Any]]] = {}
    for group in groups:
        k, x = factors[group.tensor], index.values[group.tensor]
        nodes = [index.nodes[name] for name in group.products]
        fold = _find_group_fold(index, group, k)
        if fold is not None:
            fold.apply(editor)
            folded[group.tensor] = fold.divisors
        else:
            inverse = editor.constant(f"{group.tensor}/smoothing", 1 / k)
            smoothed = editor.node("Mul", [x, inverse], f"{group.tensor}/smoothed", before=nodes[0], like=x)
            for node in nodes:
                node.replace_input_with(0, smoothed)
        for node in nodes:
            weights = constant(node.inputs[1])
            assert weights is not None
            replace_weight(editor, node, 1, weights * (k[None, :] if _is_transposed(node) else k[:, None]))
    return folded


def _find_group_fold(index: GraphIndex, group: ProductGroup, k: Floats) -> ChannelFold | None:
    """Return how constants take up the division of a group's tensor by `k`, or None if they cannot."""
    x = index.values[group.tensor]
    if x.shape is None:
        return None
    divisor = k.astype(np.float64).reshape(*(1,) * (len(x.shape) - 1), -1)
    return find_fold(x, divisor, [index.nodes[name] for name in group.products])


def _is_transposed(node: ir.Node) -> bool:
    """Return whether a product's matrix is stored as [outputs, channels]."""
    return bool(node.attributes.get_int("transB", 0))


def _matrix(node: ir.Node) -> Floats:
    """Return the matrix of a product as [channels, outputs]."""
    values = constant(node.inputs[1])
    assert values is not None
    return values.T if _is_transposed(node) else values


RECOVERY = SmoothQuant()
