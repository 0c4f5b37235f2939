"""What to give more bits, by noise removed for each byte that it costs.

The noise of a tensor or product is what the outputs show where nothing but it is rounded, in the float model on this
machine's kernels: a simulator of the hardware would take a thousand times as long and say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Literal

import onnx_ir as ir

from edgeq.backends.block_products import block_products, read_blocks
from edgeq.calibrate.ranges import Range
from edgeq.graph.edit import Editor, insert_behind, set_constant
from edgeq.graph.quant_params import QuantParams
from edgeq.graph.query import is_op, name_of, only_reader, sizes
from edgeq.model.session import open_in_memory
from edgeq.tune.float_layers import MacCosts, RankedLayer, Ranking
from edgeq.tune.recover.layers import find_layers

WIDE: Literal["wide"] = "wide"
"""The field of a scheme that names the nodes whose results are raised from 8 to 16 bits."""
_ACTIVATION = ir.DataType.UINT8
_CLIPPING = ("Relu", "Clip")


def rank_products(
    model: ir.Model, quantized: ir.Model, noise_of: Callable[[Any], float], expired: Callable[[], bool]
) -> Ranking:
    """Products of a 4-bit model in the order in which to give them 8 bits.

    Args:
        model: the prepared float model.
        quantized: the same with its products in blocks of 4 bits.
        noise_of: noise power over signal power at the outputs of an open session.
        expired: whether to stop measuring; what was not measured comes last.
    """
    products = block_products(quantized)
    found: list[RankedLayer] = []
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
        found.append(RankedLayer(layer.name, (layer.name,), noise))
        costs[layer.name] = blocks.integers.size // 2
    return _ranked(found, costs, "eight_bit")


def rank_tensors(
    model: ir.Model, ranges: Mapping[str, Range], noise_of: Callable[[Any], float], expired: Callable[[], bool]
) -> Ranking:
    """Nodes in the order in which to raise what they make to 16 bits, for hardware that computes on either.

    Args:
        model: the prepared float model.
        ranges: of its tensors, as they are quantized.
        noise_of, expired: as `rank_products` has them.
    """
    found: list[RankedLayer] = []
    costs: dict[str, int] = {}
    for node in model.graph:
        name, made = str(node.name), name_of(node.outputs[0])
        unknown = made not in ranges or node.outputs[0].dtype not in (None, ir.DataType.FLOAT)
        if unknown or _is_clipped(node.outputs[0]):
            continue
        costs[name] = prod(sizes(node.outputs[0]) or (1,))
        noise = 0.0 if expired() else noise_of(open_in_memory(_rounded(model, made, ranges[made])))
        before = node.inputs[0] if is_op(node, *_CLIPPING) and node.inputs else None
        maker = before.producer() if before is not None and _is_clipped(before) else None
        found.append(RankedLayer(name, (name,) if maker is None else (str(maker.name), name), noise))
    return _ranked(found, costs, WIDE)


def _ranked(found: list[RankedLayer], costs: Mapping[str, int], field: Literal["wide", "eight_bit"]) -> Ranking:
    """By noise for each byte, the most first; `costs` in bytes by name."""
    order = sorted(found, key=lambda layer: (-layer.noise / max(1, costs[layer.name]), layer.name))
    return Ranking(tuple(order), MacCosts(costs), field=field)


def _is_clipped(value: ir.Value) -> bool:
    """Whether its only reader clips it: the range of what that makes takes its place, and it is never rounded."""
    reader = only_reader(value)
    return reader is not None and is_op(reader, *_CLIPPING)


def _rounded(model: ir.Model, tensor: str, span: Range) -> ir.Model:
    """`model` with one tensor rounded to 8 bits."""
    changed = model.clone()
    editor = Editor(changed)
    value = next(value for node in changed.graph for value in node.outputs if value.name == tensor)
    params = QuantParams.from_range(span.low, span.high, _ACTIVATION)
    quantized = editor.quantize(value, params, f"{tensor}/rounded")
    insert_behind(value, quantized, editor.dequantize(quantized, params, f"{tensor}/restored"), f"{tensor}/exact")
    changed.graph.sort()
    return changed
