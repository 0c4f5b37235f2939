"""From a Q/DQ model to a .tflite file."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from edgeq.backends.litert.lower import Lowering
from edgeq.backends.litert.network import Network
from edgeq.backends.litert.operators import HANDLERS
from edgeq.backends.litert.rules import check
from edgeq.backends.systolic.build import fixed_batch, fold_shapes, infer_shapes, two_dimensional


def lower(model: ir.Model, source: Path) -> Network:
    """Return the operators of a Q/DQ model at batch 1.

    Args:
        source: the model's file, for messages.

    Raises:
        ModelError: names the node that a .tflite file cannot express, and why.
    """
    fixed = fixed_batch(model, source)
    for change in (two_dimensional, fold_shapes):
        change(fixed)
    infer_shapes(fixed)
    network = Lowering(fixed, HANDLERS).run()
    check(network)
    return network
