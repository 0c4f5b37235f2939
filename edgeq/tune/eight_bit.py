"""Which products of a 4-bit model to give 8 bits: by noise removed for each byte that it costs.

The noise of a product is what the outputs show where nothing but its weights stands in blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import onnx_ir as ir

from edgeq.backends.block_products import block_products, read_blocks
from edgeq.graph.edit import set_constant
from edgeq.model.session import open_in_memory
from edgeq.tune.float_layers import MacCosts, RankedLayer, Ranking
from edgeq.tune.recover.layers import find_layers

FIELD: Literal["eight_bit"] = "eight_bit"
"""The field of a scheme that names the products with 8 bits."""


def rank_products(
    model: ir.Model, quantized: ir.Model, noise_of: Callable[[Any], float], expired: Callable[[], bool]
) -> Ranking:
    """Products in the order in which to give them 8 bits; their costs are bytes.

    Args:
        model: the prepared float model.
        quantized: the same with its products in blocks of 4 bits.
        noise_of: noise power over signal power at the outputs of an open session.
        expired: whether to stop measuring; what was not measured comes last.
    """
    products = block_products(quantized)
    found: dict[str, RankedLayer] = {}
    costs: dict[str, int] = {}
    for layer in find_layers(model):
        if layer.name not in products:
            continue
        blocks = read_blocks(products[layer.name])
        if blocks.bits == 8:
            continue
        changed = model.clone()
        weight = changed.graph.initializers[layer.weight]
        set_constant(weight, layer.unrows(blocks.matrix().T))
        noise = 0.0 if expired() else noise_of(open_in_memory(changed))
        found[layer.name] = RankedLayer(layer.name, (layer.name,), noise)
        costs[layer.name] = blocks.integers.size // 2
    order = sorted(found.values(), key=lambda layer: (-layer.noise / costs[layer.name], layer.name))
    return Ranking(tuple(order), MacCosts(costs), field=FIELD)
