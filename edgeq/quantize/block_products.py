"""What products with weights in blocks compute in, int8 or float, by the noise that each brings on samples.

At accuracy level 4 the kernel quantizes each row of its input in blocks along k, as long as those of the weights, with
the scale max |x| / 127 of each block, and multiplies integers. An input with few large values in a block rounds the
others away, and the answer with them (microsoft/onnxruntime 29849). Both noises are measured on rows of the float
model's own inputs x, with W the float matrix, Q what its blocks stand for, and q(x) the rounded input:

    weights  |x Q - x W|^2        activations  |q(x) Q - x Q|^2

A product computes in float where int8 activations bring more noise than weights of 4 bits do: rounding to b bits leaves
((2^4 - 1) / (2^b - 1))^2 of their noise, which is how weights of 8 bits are judged.

Products of weights in blocks (MatMulNBits) in a model: found, read, written, and what they compute in.

The operator's `accuracy_level` says it: at 4 the kernel quantizes its input to 8 bits, block by block, at run time; at
1 it expands the weights to float32. Measured on AVX-512-VNNI with AMX, float takes up to twice the time of int8 at few
rows and 0.6 of it at many; of 8-bit weights it takes 2 to 30 times as long (onnxruntime 1.32).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from edgeq_device.claim import Claim
from numpy.typing import NDArray

from edgeq.calibrate.sampled_values import drawn_rows
from edgeq.data.samples import Samples
from edgeq.model.edit import set_constant
from edgeq.model.graph import constant, constant_values, every_node, is_constant, name_of, node_input, read_count
from edgeq.model.prepare import PreparedModel
from edgeq.quantize.block_weights import BlockWeights, packed, unpacked
from edgeq.scheme import ALL_NODES
from edgeq.util.records import NOT_WRITTEN

OPERATOR, DOMAIN = "MatMulNBits", "com.microsoft"
LEVEL = "accuracy_level"
FLOAT_LEVEL, INT8_LEVEL = 1, 4


def block_products(model: ir.Model) -> dict[str, ir.Node]:
    """Products in blocks of the main graph, by the name that they had in float."""
    return {float_name(node): node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, OPERATOR)}


def float_name(product: ir.Node) -> str:
    """The name that a product in blocks had in float."""
    return (product.name or "").rpartition("_Q")[0]


def find_blocks(model: ir.Model) -> dict[str, ir.Node]:
    """Those with weights of their own, which can be changed."""
    return {
        name: node
        for name, node in block_products(model).items()
        if all(read_count(value) == 1 and is_constant(value) for value in node.inputs[1:] if value is not None)
    }


def read_blocks(product: ir.Node) -> BlockWeights:
    """The weights of a product that `edgeq.quantize.weight_only` or ONNX Runtime's quantizer wrote."""
    k, size = (product.attributes[key].as_int() for key in ("K", "block_size"))
    bits = int(product.attributes.get_int("bits", 4))
    stored, scales = (constant_values(value) for value in product.inputs[1:3])
    blocks = stored.shape[1]
    scales = scales.reshape(-1, blocks)
    zeros = constant(node_input(product, 3))
    middle = np.full(scales.shape, 1 << bits - 1, np.uint8)
    zero_points = middle if zeros is None else unpacked(zeros.reshape(len(scales), -1), bits, blocks)
    return BlockWeights(k, bits, unpacked(stored, bits, size), scales, zero_points, zeros is None)


def store_blocks(product: ir.Node, blocks: BlockWeights) -> None:
    """Give a product that `read_blocks` reads other weights, in place."""
    for position, values in enumerate(operands(blocks).values(), 1):
        value = product.inputs[position]
        assert value is not None
        set_constant(value, values)


def operands(blocks: BlockWeights) -> dict[str, NDArray[Any]]:
    """What a product in blocks reads beside its input, in the operator's order."""
    stored: dict[str, NDArray[Any]] = {
        f"Q{blocks.bits}": packed(blocks.integers, blocks.bits),
        "scales": blocks.scales,
    }
    return stored if blocks.symmetric else stored | {"zero_points": packed(blocks.zero_points, blocks.bits)}


def attributes(blocks: BlockWeights) -> Mapping[str, int]:
    """Of a product with these weights, which computes in int8."""
    size = blocks.integers.shape[-1]
    return {"K": blocks.k, "N": len(blocks.integers), "bits": blocks.bits, "block_size": size, LEVEL: INT8_LEVEL}


def set_compute(model: ir.Model, float_compute: Collection[str]) -> None:
    """Let the products that are named compute in float and all others in int8, in place. `ALL_NODES` leaves out
    those of 8 bits, which are slower so and gain little."""
    for node in every_node(model):
        if (node.domain, node.op_type) == (DOMAIN, OPERATOR):
            every = ALL_NODES in float_compute and node.attributes.get_int("bits", 4) < 8
            in_float = every or float_name(node) in float_compute
            node.attributes[LEVEL] = ir.AttrInt64(LEVEL, FLOAT_LEVEL if in_float else INT8_LEVEL)


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
