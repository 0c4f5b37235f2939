"""Compute one integer operator alone, as the simulation of whole models does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.emulate.kernels import SaturatingLayer
from edgeq.model.graph import is_depthwise, operator_of
from edgeq.model.saturation import SaturatingPath, saturation_table


def simulate_layer(node: ir.Node, inputs: Sequence[NDArray[Any] | None], *, saturating: bool = True) -> NDArray[Any]:
    """Return the output of one integer node for its inputs, in its own order. If a kernel with 16-bit sums of products
    exists for its types, the result is that kernel's; otherwise it is exact.

    Raises:
        KeyError: the operator has no model.
    """
    row = operator_of(node)
    if row.weight is None:
        raise KeyError(node.op_type)
    activation, weight = np.asarray(inputs[0]), np.asarray(inputs[row.weight])
    kind = "uint8" if row.dynamic else str(activation.dtype)
    path = saturation_table().path(node.op_type, kind, str(weight.dtype))
    exact = path is None or (path.exact_depthwise and is_depthwise(node, weight.shape))
    swapped = node.op_type == "ConvInteger"
    layer = SaturatingLayer(node, path or SaturatingPath((node.op_type,), "", "", swapped=swapped), None)
    return layer.compute(inputs, saturating=saturating and not exact).output
