"""One integer operator by itself, as the simulation of whole models computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.emulate.kernels import Layer
from edgeq.model.graph import is_depthwise, operator_of
from edgeq.model.saturation import SaturatingPath, saturation_table


def simulate_layer(node: ir.Node, inputs: Sequence[NDArray[Any] | None], *, saturating: bool = True) -> NDArray[Any]:
    """The output of one integer node by its inputs, in its own order: as a kernel with 16-bit sums of products gives it
    where there is such a path for its types, else exact.

    Raises:
        KeyError: an operator without a model.
    """
    row = operator_of(node)
    if row.weight is None:
        raise KeyError(node.op_type)
    activation, weight = np.asarray(inputs[0]), np.asarray(inputs[row.weight])
    kind = "uint8" if row.dynamic else str(activation.dtype)
    path = saturation_table().path(node.op_type, kind, str(weight.dtype))
    exact = path is None or (path.exact_depthwise and is_depthwise(node, weight.shape))
    swapped = node.op_type == "ConvInteger"
    layer = Layer(node, path or SaturatingPath((node.op_type,), "", "", swapped=swapped), None)
    return layer.compute(inputs, saturating=saturating and not exact).output
