"""Store a constant matrix as blocks of few-bit integers. Each block has the scale and zero point with the least squared
error.

An integer q of a block represents scale * (q - zero point). If the range of a block covers all its weights, a few large
weights use up most of the steps. So edgeq also tries, for each block, ranges that are narrower at either end. A range
gives the integers d = q - zero point for the weights x. The least-squares scale for these integers is sum(w x d) /
sum(w d^2). It reduces the weighted error from sum(w x^2) by sum(w x d)^2 / sum(w d^2). If the mean squares of the
inputs are known, w is the mean square of the input that is multiplied by x. (The "k-quants" of llama.cpp search for the
scale and minimum of a block in a similar way.)

Decide whether each product with weights in blocks computes in int8 or in float. The decision depends on the product's
noise on samples.

At accuracy level 4 the kernel quantizes each row of its input in blocks along k that are as long as the blocks of the
weights. Each block has the scale max |x| / 127, and the kernel multiplies integers. If a block contains a few large
values, the others are rounded to zero, and the result is lost (microsoft/onnxruntime 29849). edgeq measures the noise
of the weights and the noise of the activations on rows x of the product's input in the float model. W is the float
matrix, Q the values of its blocks, and q(x) the rounded input:

    weights  |x Q - x W|^2        activations  |q(x) Q - x Q|^2

A product computes in float if int8 activations add more noise than 4-bit weights do. If the weights have b bits, the
noise of 4-bit weights follows from this ratio of rounding noise:

    noise(b bits) / noise(4 bits) = ((2^4 - 1) / (2^b - 1))^2

Find, read and write the products with weights in blocks (MatMulNBits) of a model, and set the type in which they
compute.

The operator's `accuracy_level` sets this type. At 4 the kernel quantizes its input to 8 bits, block by block, at run
time. At 1 it expands the weights to float32. Measured on AVX-512-VNNI with AMX: for few rows, float takes up to twice
as long as int8; for many rows, it takes 0.6 times as long. With 8-bit weights, float takes 2 to 30 times as long as
int8 (onnxruntime 1.32).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir
from edgeq_device.measure.claim import Claim
from numpy.typing import NDArray

from edgeq.calibration.sampled_values import drawn_rows
from edgeq.data.samples import Samples
from edgeq.model.edit import set_constant
from edgeq.model.graph import constant, constant_values, every_node, is_constant, name_of, node_input, read_count
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import ALL_NODES
from edgeq.util.records import NOT_WRITTEN

Floats = NDArray[np.float32]
T = TypeVar("T", bound=np.generic)

# Factors for both ends of a block's range. The search first tries every pair of these factors, then takes steps from
# the best pair. If it tried every pair of a fine grid, the error would be half a percent smaller, at thirty times the
# work (tests/backends/test_block_weights.py, benchmarks/blocks.py).
_SHRUNK = (1.0, 0.9, 0.8, 0.7)
_STEPS = (0.05, 0.025)
_REFITS = 2
# Number of weights that are searched at once. It is small enough for their data to stay in the cache.
_BATCH = 1 << 16
# With this number of bits or more, the steps are so fine that narrower ranges gain nothing.
_FINE_BITS = 8


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """Hold a matrix [k, n] in blocks along k, in the layout of MatMulNBits.

    The last block of a column is padded with zeros.

    Attributes:
        k: number of rows of the matrix.
        bits: number of bits of an integer.
        integers: uint8 [n, blocks, block size].
        scales: float32 [n, blocks].
        zero_points: uint8 [n, blocks].
        symmetric: True if every zero point is the middle, 2^(bits - 1), and is not stored.
    """

    k: int
    bits: int
    integers: NDArray[np.uint8]
    scales: Floats
    zero_points: NDArray[np.uint8]
    symmetric: bool

    @property
    def differences(self) -> NDArray[np.int64]:
        """Return the integers minus their zero points, int64 [n, k]."""
        return self._rows(self.integers.astype(np.int64) - self.zero_points[:, :, None])

    @property
    def steps(self) -> Floats:
        """Return the scale of each weight, float32 [n, k]."""
        return self._rows(np.broadcast_to(self.scales[:, :, None], self.integers.shape))

    @property
    def limits(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the smallest and largest difference that each weight can have, int64 [n, k]."""
        low = -np.broadcast_to(self.zero_points[:, :, None].astype(np.int64), self.integers.shape)
        return self._rows(low), self._rows(low + (1 << self.bits) - 1)

    def matrix(self) -> Floats:
        """Return the numbers that the integers represent, float32 [k, n]."""
        return np.ascontiguousarray((self.differences * self.steps).astype(np.float32).T)

    def of_outputs(self, columns: NDArray[np.int64]) -> BlockWeights:
        """Return only the blocks of the columns in `columns`."""
        parts = {name: getattr(self, name)[columns] for name in ("integers", "scales", "zero_points")}
        return replace(self, **parts)

    def with_differences(self, differences: NDArray[np.int64]) -> BlockWeights:
        """Return a copy with new integers. `differences` are these integers minus their zero points, int64 [n, k]."""
        padded = np.zeros((len(differences), self.integers[0].size), np.int64)
        padded[:, : self.k] = differences
        integers = padded.reshape(self.integers.shape) + self.zero_points[:, :, None]
        assert integers.min() >= 0, "integers below their type"
        assert integers.max() < 1 << self.bits, "integers above their type"
        return BlockWeights(self.k, self.bits, integers.astype(np.uint8), self.scales, self.zero_points, self.symmetric)

    def _rows(self, blocks: NDArray[T]) -> NDArray[T]:
        return blocks.reshape(len(blocks), -1)[:, : self.k]


def fit_blocks(
    matrix: Floats, bits: int, size: int, *, symmetric: bool = False, importance: Floats | None = None
) -> BlockWeights:
    """Quantize a matrix in blocks.

    Args:
        matrix: float32 [k, n].
        bits: number of bits of an integer, 2 to 8.
        size: number of weights in a block.
        symmetric: whether the zero point is in the middle and is not stored.
        importance: mean square of each input, float32 [k]; with None, all inputs count equally.

    Returns:
        The blocks. Of the candidates that were tried, each block has the one with the smallest weighted squared error.
    """
    k, n = matrix.shape
    blocks = -(-k // size)
    padded = np.zeros((n, blocks * size), np.float32)
    padded[:, :k] = matrix.T
    weights = np.zeros(blocks * size, np.float32)
    # Importance is scaled, because the squares of small inputs would underflow in float32. Only ratios within a block
    # matter.
    weights[:k] = 1 if importance is None else importance / np.maximum(importance.max(initial=0), np.float32(1e-30))
    rows = padded.reshape(n * blocks, size)
    per_block = np.maximum(weights.reshape(blocks, size), np.float32(1e-6)) * (np.arange(blocks * size) < k).reshape(
        blocks, size
    )
    scales, zeros = np.ones(len(rows), np.float32), np.zeros(len(rows), np.uint8)
    integers = np.empty(rows.shape, np.uint8)
    step = max(1, _BATCH // (blocks * size)) * blocks  # a whole number of columns
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        x = np.ascontiguousarray(rows[part].T)
        search = _BlockSearch(x, np.tile(per_block.T, x.shape[1] // blocks), bits)
        fitted, scales[part], zeros[part] = search.symmetric() if symmetric else search.asymmetric()
        integers[part] = fitted.T
    return BlockWeights(
        k, bits, integers.reshape(n, blocks, size), scales.reshape(n, blocks), zeros.reshape(n, blocks), symmetric
    )


def pack(integers: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack integers [..., count] of 4 or 8 bits into bytes [..., ceil(count * bits / 8)].

    A byte contains two 4-bit integers, the first in its lower half.
    """
    if bits == 8:
        return integers
    if integers.shape[-1] % 2:
        integers = np.concatenate([integers, np.zeros((*integers.shape[:-1], 1), np.uint8)], axis=-1)
    return np.ascontiguousarray(integers[..., ::2] | integers[..., 1::2] << 4)


def unpack(stored: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """Unpack `count` integers from the result of `pack`."""
    if bits == 8:
        return stored[..., :count]
    both = np.stack([stored & 15, stored >> 4], axis=-1)
    return np.ascontiguousarray(both.reshape(*stored.shape[:-1], -1)[..., :count])


class _BlockSearch:
    """Hold the best scale and zero point found so far for each of r blocks.

    The weights x and their importance are arrays [size, r]. An operation on all blocks at once then reads contiguous
    memory.
    """

    def __init__(self, x: Floats, weights: Floats, bits: int) -> None:
        self._x, self._weights = x, weights
        self._weighted = weights * x
        self._bits = bits
        self._top = (1 << bits) - 1
        self._gain = np.full(x.shape[1], -1, np.float32)
        self._scale = np.ones(x.shape[1], np.float32)
        self._zero = np.zeros(x.shape[1], np.float32)

    def asymmetric(self) -> tuple[NDArray[np.uint8], Floats, NDArray[np.uint8]]:
        """Search with any zero point, and return integers, scales and zero points."""
        low, high = np.minimum(self._x.min(0), 0), np.maximum(self._x.max(0), 0)
        ends = np.ones((2, len(low)), np.float32)

        def attempt(factors: Floats) -> None:
            scale = (factors[1] * high - factors[0] * low) / self._top
            scale[scale == 0] = 1
            better = self._try(scale, np.clip(np.rint(-factors[0] * low / scale), 0, self._top))
            ends[:, better] = factors[:, better]

        if self._bits >= _FINE_BITS:
            attempt(ends.copy())
        else:
            for pair in product(_SHRUNK, repeat=2):
                attempt(np.repeat(np.array(pair, np.float32)[:, None], len(low), axis=1))
            for step in _STEPS:
                best = ends.copy()
                for moves in product((-step, 0, step), repeat=2):
                    attempt(best + np.array(moves, np.float32)[:, None])
        return self._best_blocks()

    def symmetric(self) -> tuple[NDArray[np.uint8], Floats, NDArray[np.uint8]]:
        """Search with every zero point in the middle, and return integers, scales and zero points.

        Negative scales are tried too, because the integers have one more step below zero than above.
        """
        middle = np.full(self._x.shape[1], 1 << self._bits - 1, np.float32)
        widest = np.abs(self._x).max(0) / middle
        widest[widest == 0] = 1
        shares = np.linspace(0.6, 1.15, 1 if self._bits >= _FINE_BITS else 12, dtype=np.float32)
        for share, sign in product(shares if len(shares) > 1 else (1.0,), (1, -1)):
            self._try(sign * share * widest, middle)
        return self._best_blocks()

    def _differences(self, scale: Floats, zero: Floats) -> Floats:
        nearest: Floats = self._x / scale
        np.rint(nearest, out=nearest)
        # np.clip takes three times as long as these two lines.
        np.maximum(nearest, -zero, out=nearest)
        np.minimum(nearest, self._top - zero, out=nearest)
        return nearest

    def _try(self, scale: Floats, zero: Floats) -> NDArray[np.bool_]:
        """Try a candidate for each block: fit its scale, and keep it if it is better than the best so far.

        Return for each block whether the candidate is better, [r].
        """
        differences = self._differences(scale, zero)
        along = np.einsum("sr,sr->r", self._weighted, differences)
        power = np.einsum("sr,sr->r", self._weights * differences, differences)
        fitted = np.divide(along, power, out=scale.copy(), where=(power > 0) & (along != 0))
        gain = fitted * along
        better: NDArray[np.bool_] = gain > self._gain
        self._gain[better], self._scale[better], self._zero[better] = gain[better], fitted[better], zero[better]
        return better

    def _best_blocks(self) -> tuple[NDArray[np.uint8], Floats, NDArray[np.uint8]]:
        for _ in range(_REFITS):
            self._try(self._scale.copy(), self._zero.copy())
        integers = self._differences(self._scale, self._zero) + self._zero
        return integers.astype(np.uint8), self._scale, self._zero.astype(np.uint8)


OPERATOR, DOMAIN = "MatMulNBits", "com.microsoft"
LEVEL = "accuracy_level"
FLOAT_LEVEL, INT8_LEVEL = 1, 4


def block_products(model: ir.Model) -> dict[str, ir.Node]:
    """Return the products with weights in blocks of the main graph, by their names in the float model."""
    return {float_name(node): node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, OPERATOR)}


def float_name(product: ir.Node) -> str:
    """Return the name that a product with weights in blocks had in the float model."""
    return (product.name or "").rpartition("_Q")[0]


def find_blocks(model: ir.Model) -> dict[str, ir.Node]:
    """Return the products whose weights no other node reads, by their names in the float model. Such weights can be
    changed.
    """
    return {
        name: node
        for name, node in block_products(model).items()
        if all(read_count(value) == 1 and is_constant(value) for value in node.inputs[1:] if value is not None)
    }


def read_blocks(product: ir.Node) -> BlockWeights:
    """Return the weights of a product. `edgeq.quantization.weight_only` or ONNX Runtime's quantizer must have written
    them.
    """
    k, size = (product.attributes[key].as_int() for key in ("K", "block_size"))
    bits = int(product.attributes.get_int("bits", 4))
    stored, scales = (constant_values(value) for value in product.inputs[1:3])
    blocks = stored.shape[1]
    scales = scales.reshape(-1, blocks)
    zeros = constant(node_input(product, 3))
    middle = np.full(scales.shape, 1 << bits - 1, np.uint8)
    zero_points = middle if zeros is None else unpack(zeros.reshape(len(scales), -1), bits, blocks)
    return BlockWeights(k, bits, unpack(stored, bits, size), scales, zero_points, zeros is None)


def store_blocks(product: ir.Node, blocks: BlockWeights) -> None:
    """Replace the weights of a product, in place. `read_blocks` must be able to read the product."""
    for position, values in enumerate(operands(blocks).values(), 1):
        value = product.inputs[position]
        assert value is not None
        set_constant(value, values)


def operands(blocks: BlockWeights) -> dict[str, NDArray[Any]]:
    """Return the operands that follow the input of a MatMulNBits, in the operator's order."""
    stored: dict[str, NDArray[Any]] = {
        f"Q{blocks.bits}": pack(blocks.integers, blocks.bits),
        "scales": blocks.scales,
    }
    return stored if blocks.symmetric else stored | {"zero_points": pack(blocks.zero_points, blocks.bits)}


def attributes(blocks: BlockWeights) -> Mapping[str, int]:
    """Return the attributes of a MatMulNBits that has these weights and computes in int8."""
    size = blocks.integers.shape[-1]
    return {"K": blocks.k, "N": len(blocks.integers), "bits": blocks.bits, "block_size": size, LEVEL: INT8_LEVEL}


def set_compute(model: ir.Model, float_compute: Collection[str]) -> None:
    """Set the products named in `float_compute` to float and all others to int8, in place.

    `ALL_NODES` does not include products with 8-bit weights: in float they would be slower and hardly more accurate.
    """
    for node in every_node(model):
        if (node.domain, node.op_type) == (DOMAIN, OPERATOR):
            every = ALL_NODES in float_compute and node.attributes.get_int("bits", 4) < 8
            in_float = every or float_name(node) in float_compute
            node.attributes[LEVEL] = ir.AttrInt64(LEVEL, FLOAT_LEVEL if in_float else INT8_LEVEL)


DETAIL = "block_compute"
"""Key of the `BlockCompute` in an artifact's `details`."""
# Largest number of rows that are taken from one sample, and largest number of outputs that are measured in a product. A
# few thousand pairs of rows and outputs are enough to estimate the noise within a few percent.
_POSITIONS, _OUTPUTS = 16, 512
_MIN_BITS = 4


@dataclass(frozen=True)
class ProductNoise:
    """Hold the noise at the output of one product, as noise power over signal power. Both numbers are 0 if the noise
    was not measured.
    """

    name: str
    bits: int
    weights: float = 0.0
    activations: float = 0.0

    @property
    def rounded_away(self) -> bool:
        """Return whether int8 activations add more noise than 4-bit weights."""
        coarser = ((1 << self.bits) - 1) / ((1 << _MIN_BITS) - 1)
        return self.activations > self.weights * coarser**2


@dataclass(frozen=True)
class ProductKind:
    """Describe a group of products that have the same number of bits and compute in the same type.

    Attributes:
        count: number of products.
        weights_db: noise of the weights relative to the signal; the median over the products; None if not measured.
        activations_db: noise that int8 activations add, relative to the signal; the median over the products; None if
            not measured.
    """

    bits: int
    compute: Literal["int8", "float32"]
    count: int
    weights_db: float | None = None
    activations_db: float | None = None

    def summary(self) -> str:
        """Return one readable line."""
        text = f"{self.count} of {self.bits} bits in {self.compute}"
        if self.weights_db is None or self.activations_db is None:
            return text
        brought = "bring" if self.compute == "int8" else "would bring"
        return (
            f"{text}; weights' noise {self.weights_db:.1f} dB, int8 activations {brought} {self.activations_db:.1f} dB"
        )


@dataclass(frozen=True)
class BlockCompute:
    """Describe the types in which the products of a model compute.

    Attributes:
        float_compute: names of the products that compute in float, like `Scheme.float_compute`.
        why: the reason for the choice, one sentence without a full stop.
        kinds: the products, grouped by number of bits and type.
        noise: the noise of each product; empty if it was not measured.
        race: speed of float compute against int8 on this machine; None if the two were not timed.
    """

    float_compute: tuple[str, ...]
    why: str
    kinds: tuple[ProductKind, ...]
    noise: tuple[ProductNoise, ...] = field(default=(), metadata=NOT_WRITTEN)
    race: Claim | None = None

    @property
    def note(self) -> str:
        """Return the reason, preceded by the subject that it explains."""
        return f"what products with weights in blocks compute in: {self.why}"


def choose_compute(model: ir.Model, prepared: PreparedModel, samples: Samples) -> BlockCompute:
    """Set each product of `model` to int8 or float, depending on its noise on samples, in place.

    Args:
        model: copy of `prepared` whose products have weights in blocks.

    Raises:
        DataError: ONNX Runtime refuses a sample.
    """
    noise = measure_noise(model, prepared, samples)
    coarse = tuple(product.name for product in noise if product.rounded_away)
    set_compute(model, coarse)
    why = "int8, whose activations bring less noise than weights of 4 bits do"
    if coarse:
        why = (
            f"float in {len(coarse)}, where int8 activations bring more noise than weights of 4 bits do; int8 in others"
        )
    return BlockCompute(coarse, why, kinds_of(model, noise), noise)


def given_compute(model: ir.Model, float_compute: Collection[str] | None) -> BlockCompute:
    """Set the products named in `float_compute` to float and the others to int8, in place.

    Args:
        float_compute: names of the products; None if there were no samples for a choice.
    """
    set_compute(model, float_compute or ())
    compute = "float" if float_compute else "int8"
    why = f"{compute}, as given" if float_compute is not None else "int8: there were no samples to measure its noise on"
    return BlockCompute(tuple(float_compute or ()), why, kinds_of(model))


def kinds_of(model: ir.Model, noise: Iterable[ProductNoise] = ()) -> tuple[ProductKind, ...]:
    """Return the products of a model, grouped by number of bits and by the type in which they compute."""
    noise_by_name = {
        product_noise.name: product_noise
        for product_noise in noise
        if product_noise.weights or product_noise.activations
    }
    kinds: dict[tuple[int, Literal["int8", "float32"]], list[str]] = {}
    for name, node in block_products(model).items():
        compute: Literal["int8", "float32"] = "float32" if is_in_float(node) else "int8"
        kinds.setdefault((node.attributes.get_int("bits", 4) or 4, compute), []).append(name)
    return tuple(
        ProductKind(
            bits,
            compute,
            len(names),
            _median_db([noise_by_name[name].weights for name in names if name in noise_by_name]),
            _median_db([noise_by_name[name].activations for name in names if name in noise_by_name]),
        )
        for (bits, compute), names in sorted(kinds.items())
    )


def is_in_float(product: ir.Node) -> bool:
    """Return whether a product with weights in blocks computes in float."""
    return product.attributes.get_int(LEVEL, 0) in (0, FLOAT_LEVEL)


def measure_noise(model: ir.Model, prepared: PreparedModel, samples: Samples) -> tuple[ProductNoise, ...]:
    """Return, for each product of the main graph, the noise of its weights in blocks and the noise of int8 activations.
    Each product is measured separately.

    Args:
        model: copy of `prepared` whose products have weights in blocks.
        samples: samples; a few of them run through the float model.
    """
    products = block_products(model)
    layers = {str(node.name): node for node in prepared.model.graph if node.name in products}
    inputs = [node.inputs[0] for node in layers.values()]
    sources = {name_of(value) for value in inputs if value is not None and not value.is_initializer()}
    drawn = drawn_rows(prepared, dict.fromkeys(sorted(sources), -1), samples, positions=_POSITIONS)
    noise = []
    for name, node in products.items():
        layer = layers.get(name)
        rows = drawn.get(name_of(layer.inputs[0])) if layer is not None else None
        if layer is None or rows is None:
            noise.append(ProductNoise(name, node.attributes.get_int("bits", 4) or 4))
            continue
        noise.append(_noise(name, node, layer, rows.astype(np.float32)))
    return tuple(noise)


def _noise(name: str, product: ir.Node, layer: ir.Node, rows: NDArray[np.float32]) -> ProductNoise:
    blocks = read_blocks(product)
    outputs = len(blocks.integers)
    columns = np.unique(np.linspace(0, outputs - 1, min(outputs, _OUTPUTS)).astype(np.int64))
    stored = blocks.of_outputs(columns).matrix()
    values = constant_values(layer.inputs[1])
    matrix = values.reshape(values.shape[-2:])
    exact = rows @ (matrix[columns].T if layer.attributes.get_int("transB", 0) else matrix[:, columns])
    approximate = rows @ stored
    signal = float(np.square(exact).sum(dtype=np.float64)) or 1.0
    activations = (int8_rows(rows, blocks.integers.shape[-1]) - rows) @ stored
    return ProductNoise(
        name,
        blocks.bits,
        float(np.square(approximate - exact).sum(dtype=np.float64)) / signal,
        float(np.square(activations).sum(dtype=np.float64)) / signal,
    )


def int8_rows(rows: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Return the input rows rounded as the kernel rounds them at accuracy level 4, float32 [r, k].

    Every `size` values of a row are rounded with one scale, to 127 steps on either side of zero.
    """
    count, k = rows.shape
    padded = np.zeros((count, -(-k // size) * size), np.float32)
    padded[:, :k] = rows
    blocks = padded.reshape(count, -1, size)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    scale[scale == 0] = 1
    return np.asarray((np.rint(blocks / scale) * scale).reshape(count, -1)[:, :k], np.float32)


def _median_db(powers: list[float]) -> float | None:
    return round(10 * float(np.log10(max(1e-20, np.median(powers)))), 1) if powers else None
