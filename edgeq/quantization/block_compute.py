"""Decide whether each product with weights in blocks computes in int8 or in float. The decision depends on the
product's noise on samples.

At accuracy level 4 the kernel quantizes each row of its input in blocks along k that are as long as the blocks of the
weights. Each block has the scale max |x| / 127, and the kernel multiplies integers. If a block contains a few large
values, the others are rounded to zero, and the result is lost (microsoft/onnxruntime 29849). edgeq measures the noise
of the weights and the noise of the activations on rows x of the product's input in the float model. W is the float
matrix, Q the values of its blocks, and q(x) the rounded input:

    weights  |x Q - x W|^2        activations  |q(x) Q - x Q|^2

A product computes in float if int8 activations add more noise than 4-bit weights do. If the weights have b bits, the
noise of 4-bit weights follows from this ratio of rounding noise:

    noise(b bits) / noise(4 bits) = ((2^4 - 1) / (2^b - 1))^2
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir
from edgeq_device.measure.claim import Claim
from numpy.typing import NDArray

from edgeq.calibration.sampled_values import drawn_rows
from edgeq.data.samples import Samples
from edgeq.model.graph import constant_values, name_of
from edgeq.model.prepare import PreparedModel
from edgeq.quantization.block_products import block_products, is_in_float, read_blocks, set_compute
from edgeq.util.records import NOT_WRITTEN

DETAIL = "block_compute"
"""Key of the `BlockCompute` in an artifact's `details`."""
# Largest number of rows that are taken from one sample, and largest number of outputs that are measured in a product. A
# few thousand pairs of rows and outputs are enough to estimate the noise within a few percent.
_POSITIONS, _OUTPUTS = 16, 512
# The noise of weights with this many bits is the yardstick, because users who choose 4 bits accept it.
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
        # Without samples there are only numbers and types to report.
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
    # One run of the float model over the samples serves all products.
    drawn = drawn_rows(prepared, dict.fromkeys(sorted(sources), -1), samples, positions=_POSITIONS)
    noise = []
    for name, node in products.items():
        layer = layers.get(name)
        rows = drawn.get(name_of(layer.inputs[0])) if layer is not None else None
        # A product in a body has no rows, and its noise stays unknown.
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
    # A product whose output is all zero has no noise either, whatever it is divided by.
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
    # A block of zeros needs some scale, and any scale represents zero exactly.
    scale[scale == 0] = 1
    return np.asarray((np.rint(blocks / scale) * scale).reshape(count, -1)[:, :k], np.float32)


def _median_db(powers: list[float]) -> float | None:
    return round(10 * float(np.log10(max(1e-20, np.median(powers)))), 1) if powers else None
