"""Convert an ONNX model, float or with Q/DQ pairs, to ncnn's layers at batch size 1."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from edgeq.backends.ncnn.centre import centre
from edgeq.backends.ncnn.lower import NcnnLowering
from edgeq.backends.ncnn.network import NcnnNetwork
from edgeq.backends.ncnn.operators import handlers
from edgeq.errors import ModelError
from edgeq.model.einsum import write_einsums
from edgeq.model.fixed_shapes import at_batch_one, fold_shapes, infer_shapes
from edgeq.model.fold import fold_batch_norms
from edgeq.model.gemm import plain_gemms
from edgeq.model.names import name_nodes
from edgeq.model.pools import write_whole_pools

_FORMAT = "a file for ncnn"


def lower(model: ir.Model, source: Path) -> NcnnNetwork:
    """Return the layers of a model.

    Args:
        source: the model's file, for messages.

    Raises:
        ModelError: ncnn's files cannot express a node; the message names the node and the reason.
    """
    return NcnnLowering(prepare_graph(model, source), handlers()).run(source)


def refusals(model: ir.Model, source: Path) -> dict[str, str]:
    """Return the nodes of a float model that ncnn's files cannot express, each with the reason. If an input cannot be
    written, return its reason under the name "".
    """
    try:
        return NcnnLowering(prepare_graph(model, source), handlers()).refusals()
    except ModelError as error:
        return {"": error.text.removeprefix(f"{source}: ")}


def prepare_graph(model: ir.Model, source: Path) -> ir.Model:
    """Return a clone of a model with fixed sizes, without operators for which others are written."""
    fixed = at_batch_one(model, source, _FORMAT)
    name_nodes(fixed)
    # All passes run in any case, hence the sum and not `or`. Models with pairs are prepared already.
    if fold_batch_norms(fixed) + plain_gemms(fixed) + write_einsums(fixed) + write_whole_pools(fixed):
        infer_shapes(fixed)
    while fold_shapes(fixed):  # The folded values may be shapes that other nodes read.
        infer_shapes(fixed)
    # The emulation does the same, so the proof includes it.
    centre(fixed)
    return fixed
