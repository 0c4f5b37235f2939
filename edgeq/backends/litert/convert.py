"""Convert a Q/DQ model to a .tflite file."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from edgeq.backends.litert.dialect import dialect
from edgeq.backends.litert.fuse import fuse_activations
from edgeq.backends.litert.gelu import join_gelu
from edgeq.backends.litert.lower import Lowering
from edgeq.backends.litert.network import TfliteNetwork, TfliteOperator
from edgeq.backends.litert.operators import HANDLERS
from edgeq.backends.litert.rules import check
from edgeq.errors import ModelError
from edgeq.model.einsum import write_einsums
from edgeq.model.fixed_shapes import at_batch_one, fold_shapes, infer_shapes
from edgeq.model.pools import write_whole_pools


def lower(model: ir.Model, source: Path) -> TfliteNetwork:
    """Return the operators of a Q/DQ model at batch size 1.

    Args:
        source: the model's file, for messages.

    Raises:
        ModelError: a .tflite file cannot express a node; the message names the node and the reason.
    """
    fixed = prepare_graph(model, source)
    network = fuse_activations(Lowering(fixed, HANDLERS).run())
    check(network)
    return network


def refusals(model: ir.Model, source: Path, engine: str) -> dict[str, str]:
    """Return the nodes of a float model that a .tflite file for an engine cannot express, each with the reason. If an
    input has no fixed sizes, return that input alone.
    """
    try:
        # A float model has no Q/DQ, so every node is lowered in its float form: what fails here fails in every scheme.
        refused, operators = Lowering(prepare_graph(model, source), HANDLERS).refusals()
    except ModelError as error:
        return {"": error.text.removeprefix(f"{source}: ")}
    for operator in operators:
        if dialect()[operator.kind].lacks(engine, operator.type):
            refused.setdefault(operator.node, f"becomes {operator.kind}, for which {engine} has no kernel")
    return refused


def float_operators(model: ir.Model, source: Path) -> tuple[TfliteOperator, ...]:
    """Return the operators of a float model's file that can be written. Return none if an input has no fixed sizes."""
    try:
        return Lowering(prepare_graph(model, source), HANDLERS).refusals()[1]
    except ModelError:
        return ()


def prepare_graph(model: ir.Model, source: Path) -> ir.Model:
    """Return a clone of a model with fixed sizes and without the operators for which others are written."""
    fixed = at_batch_one(model, source, "a .tflite file")
    # Both passes run in any case, hence the sum and not `or`.
    if write_einsums(fixed) + write_whole_pools(fixed):
        infer_shapes(fixed)
    while fold_shapes(fixed):  # The folded values may be shapes that other nodes read.
        infer_shapes(fixed)
    # Last, because folding may make the constants that identify a Gelu.
    join_gelu(fixed)
    return fixed
