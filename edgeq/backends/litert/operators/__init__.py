"""Write each ONNX operator as operators of a .tflite file. One function covers one kind of operator.

Each function reads its inputs as integers if the node computes on integers (`Lowering.integer`), or else as floats. It
writes operators of the file that compute the same result.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from edgeq.backends.litert.lower import Lowering
from edgeq.backends.litert.operators.elements import (
    write_batch_norm,
    write_binary,
    write_cast,
    write_clamp,
    write_gelu,
    write_hard_sigmoid,
    write_layer_norm,
    write_leaky,
    write_mean,
    write_prelu,
    write_softmax,
    write_unary,
)
from edgeq.backends.litert.operators.movement import (
    write_concat,
    write_depth_to_space,
    write_gather,
    write_identity,
    write_pad_node,
    write_pool,
    write_reshape,
    write_resize,
    write_slice,
    write_space_to_depth,
    write_split,
    write_transpose,
)
from edgeq.backends.litert.operators.products import write_conv, write_conv_transpose, write_gemm, write_matmul

_REDUCTIONS = ("GlobalAveragePool", "GlobalMaxPool", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
_BINARY = {"Add": "ADD", "Sub": "SUB", "Mul": "MUL", "Div": "DIV", "Max": "MAXIMUM", "Min": "MINIMUM"}
_ALIKE: dict[str, Callable[[Lowering, ir.Node], None]] = {
    **{name: write_binary(kind) for name, kind in _BINARY.items()},
    **{
        name: write_unary(kind)
        for name, kind in {
            "Sigmoid": "LOGISTIC",
            "Tanh": "TANH",
            "HardSwish": "HARD_SWISH",
            "Elu": "ELU",
            "Exp": "EXP",
            "Sqrt": "SQRT",
            "Abs": "ABS",
            "Neg": "NEG",
            "Log": "LOG",
            "Sin": "SIN",
            "Cos": "COS",
        }.items()
    },
    **dict.fromkeys(("Relu", "Clip"), write_clamp),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), write_reshape),
    **dict.fromkeys(("Identity", "Dropout"), write_identity),
    **dict.fromkeys(("MaxPool", "AveragePool"), write_pool),
    **dict.fromkeys(
        ("GlobalAveragePool", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "GlobalMaxPool"), write_mean
    ),
    **dict.fromkeys(("Softmax", "LogSoftmax"), write_softmax),
}

HANDLERS: dict[str, Callable[[Lowering, ir.Node], None]] = {
    **_ALIKE,
    "BatchNormalization": write_batch_norm,
    "Cast": write_cast,
    "Concat": write_concat,
    "Conv": write_conv,
    "ConvTranspose": write_conv_transpose,
    "DepthToSpace": write_depth_to_space,
    "Gather": write_gather,
    "Gelu": write_gelu,
    "Gemm": write_gemm,
    "HardSigmoid": write_hard_sigmoid,
    "LayerNormalization": write_layer_norm,
    "LeakyRelu": write_leaky,
    "MatMul": write_matmul,
    "PRelu": write_prelu,
    "Pad": write_pad_node,
    "Resize": write_resize,
    "Slice": write_slice,
    "SpaceToDepth": write_space_to_depth,
    "Split": write_split,
    "Transpose": write_transpose,
}
