"""What products with weights in blocks compute in, int8 or float, by the noise that each brings on samples.

At accuracy level 4 the kernel quantizes each row of its input in blocks along k, as long as those of the weights, with
the scale max |x| / 127 of each block, and multiplies integers. An input with few large values in a block rounds the
others away, and the answer with them (microsoft/onnxruntime 29849). Both noises are measured on rows of the float
model's own inputs x, with W the float matrix, Q what its blocks stand for, and q(x) the rounded input:

    weights  |x Q - x W|^2        activations  |q(x) Q - x Q|^2

A product computes in float where int8 activations bring more noise than weights of 4 bits do: rounding to b bits leaves
((2^4 - 1) / (2^b - 1))^2 of their noise, which is how weights of 8 bits are judged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import onnx_ir as ir
from edgeq_device.claim import Claim
from numpy.typing import NDArray

from edgeq.backends.base import Artifact
from edgeq.backends.block_products import FLOAT_LEVEL, LEVEL, block_products, read_blocks, set_compute
from edgeq.calibrate.sampled_values import drawn_rows
from edgeq.data.samples import Samples
from edgeq.graph.query import constant_values, name_of
from edgeq.model.prepare import PreparedModel
from edgeq.records import NOT_WRITTEN

DETAIL = "block_compute"
"""Of an artifact's `details`: its `BlockCompute`."""
# Of one sample, and outputs of a product: some thousand products of rows and columns tell the noise to a few percent.
_POSITIONS, _OUTPUTS = 16, 512
_LEAST_BITS = 4


@dataclass(frozen=True)
class ProductNoise:
    """Noise power over signal power at the output of one product; zeros where it was not measured."""

    name: str
    bits: int
    weights: float = 0.0
    activations: float = 0.0

    @property
    def rounded_away(self) -> bool:
        """Whether int8 activations bring more noise than weights of 4 bits."""
        coarser = ((1 << self.bits) - 1) / ((1 << _LEAST_BITS) - 1)
        return self.activations > self.weights * coarser**2


@dataclass(frozen=True)
class ProductKind:
    """Products that have the same bits and compute in the same type.

    Attributes:
        count: how many.
        weights_db, activations_db: noise of the weights, and what int8 activations bring, against the signal: the
            median of the products. None where it was not measured.
    """

    bits: int
    compute: Literal["int8", "float32"]
    count: int
    weights_db: float | None = None
    activations_db: float | None = None

    def summary(self) -> str:
        """One line for people."""
        text = f"{self.count} of {self.bits} bits in {self.compute}"
        if self.weights_db is None or self.activations_db is None:
            return text
        brought = "bring" if self.compute == "int8" else "would bring"
        return (
            f"{text}; weights' noise {self.weights_db:.1f} dB, int8 activations {brought} {self.activations_db:.1f} dB"
        )


@dataclass(frozen=True)
class BlockCompute:
    """What the products of a model compute in.

    Attributes:
        float_compute: those in float, as a scheme has them.
        why: one sentence without a full stop.
        kinds: the products by bits and type.
        noise: of each product; empty where it was not measured.
        race: float compute against int8 on this machine; None where they were not raced.
    """

    float_compute: tuple[str, ...]
    why: str
    kinds: tuple[ProductKind, ...]
    noise: tuple[ProductNoise, ...] = field(default=(), metadata=NOT_WRITTEN)
    race: Claim | None = None

    @property
    def note(self) -> str:
        """The reason, where nothing says what it is of."""
        return f"what products with weights in blocks compute in: {self.why}"


def choose_compute(model: ir.Model, prepared: PreparedModel, samples: Samples) -> BlockCompute:
    """Let the products of `model` compute in what their noise on samples calls for, in place.

    Args:
        model: `prepared` with products in blocks.

    Raises:
        DataError: ONNX Runtime refuses a sample.
    """
    noise = measure_noise(model, prepared, samples)
    chosen = tuple(found.name for found in noise if found.rounded_away)
    set_compute(model, chosen)
    why = "int8, whose activations bring less noise than weights of 4 bits do"
    if chosen:
        why = (
            f"float in {len(chosen)}, where int8 activations bring more noise than weights of 4 bits do; int8 in others"
        )
    return BlockCompute(chosen, why, kinds_of(model, noise), noise)


def given_compute(model: ir.Model, float_compute: Collection[str] | None) -> BlockCompute:
    """Let the products of `model` compute in float where they are named, in place; None: there are no samples by which
    to choose."""
    set_compute(model, float_compute or ())
    compute = "float" if float_compute else "int8"
    why = f"{compute}, as given" if float_compute is not None else "int8: there were no samples to measure its noise on"
    return BlockCompute(tuple(float_compute or ()), why, kinds_of(model))


def described(artifact: Artifact, compute: BlockCompute) -> Artifact:
    """An artifact with what its products compute in, in its scheme, its details and its notes."""
    before = artifact.details.get(DETAIL)
    kept = [note for note in artifact.notes if before is None or note != before.note]
    return replace(
        artifact,
        scheme=artifact.scheme.replace(float_compute=compute.float_compute),
        details={**artifact.details, DETAIL: compute},
        notes=(*kept, compute.note),
    )


def kinds_of(model: ir.Model, noise: Iterable[ProductNoise] = ()) -> tuple[ProductKind, ...]:
    """The products of a model by what they compute in."""
    known = {found.name: found for found in noise if found.weights or found.activations}
    kinds: dict[tuple[int, Literal["int8", "float32"]], list[str]] = {}
    for name, node in block_products(model).items():
        compute: Literal["int8", "float32"] = "float32" if in_float(node) else "int8"
        kinds.setdefault((node.attributes.get_int("bits", 4) or 4, compute), []).append(name)
    return tuple(
        ProductKind(
            bits,
            compute,
            len(names),
            _median_db([known[name].weights for name in names if name in known]),
            _median_db([known[name].activations for name in names if name in known]),
        )
        for (bits, compute), names in sorted(kinds.items())
    )


def in_float(product: ir.Node) -> bool:
    """Whether a product in blocks computes in float."""
    return product.attributes.get_int(LEVEL, 0) in (0, FLOAT_LEVEL)


def measure_noise(model: ir.Model, prepared: PreparedModel, samples: Samples) -> tuple[ProductNoise, ...]:
    """What weights in blocks and int8 activations do at each product of the main graph, by itself.

    Args:
        model: `prepared` with products in blocks.
        samples: a few of them are run through the float model.
    """
    products = block_products(model)
    layers = {str(node.name): node for node in prepared.model.graph if node.name in products}
    read = [node.inputs[0] for node in layers.values()]
    sources = {name_of(value) for value in read if value is not None and not value.is_initializer()}
    drawn = drawn_rows(prepared, dict.fromkeys(sorted(sources), -1), samples, positions=_POSITIONS)
    found = []
    for name, product in products.items():
        layer = layers.get(name)
        rows = drawn.get(name_of(layer.inputs[0])) if layer is not None else None
        if layer is None or rows is None:
            found.append(ProductNoise(name, product.attributes.get_int("bits", 4) or 4))
            continue
        found.append(_noise(name, product, layer, rows.astype(np.float32)))
    return tuple(found)


def _noise(name: str, product: ir.Node, layer: ir.Node, rows: NDArray[np.float32]) -> ProductNoise:
    blocks = read_blocks(product)
    outputs = len(blocks.integers)
    chosen = np.unique(np.linspace(0, outputs - 1, min(outputs, _OUTPUTS)).astype(np.int64))
    stored = blocks.of_outputs(chosen).matrix()
    values = constant_values(layer.inputs[1])
    matrix = values.reshape(values.shape[-2:])
    exact = rows @ (matrix[chosen].T if layer.attributes.get_int("transB", 0) else matrix[:, chosen])
    plain = rows @ stored
    signal = float(np.square(exact).sum(dtype=np.float64)) or 1.0
    activations = (int8_rows(rows, blocks.integers.shape[-1]) - rows) @ stored
    return ProductNoise(
        name,
        blocks.bits,
        float(np.square(plain - exact).sum(dtype=np.float64)) / signal,
        float(np.square(activations).sum(dtype=np.float64)) / signal,
    )


def int8_rows(rows: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """What the kernel makes of its input at accuracy level 4: float32 [r, k], each `size` values of a row rounded to
    127 steps either side of zero."""
    count, k = rows.shape
    padded = np.zeros((count, -(-k // size) * size), np.float32)
    padded[:, :k] = rows
    blocks = padded.reshape(count, -1, size)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    scale[scale == 0] = 1
    return np.asarray((np.rint(blocks / scale) * scale).reshape(count, -1)[:, :k], np.float32)


def _median_db(powers: list[float]) -> float | None:
    return round(10 * float(np.log10(max(1e-20, np.median(powers)))), 1) if powers else None
