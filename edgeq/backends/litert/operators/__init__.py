"""Write each ONNX operator as operators of a .tflite file. One function covers one kind of operator.

Each function reads its inputs as integers if the node computes on integers (`Lowering.integer`), or else as floats. It
writes operators of the file that compute the same result.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from edgeq.backends.litert.lower import Lowering
from edgeq.backends.litert.operators.arithmetic import write_batch_norm, write_binary
from edgeq.backends.litert.operators.choices import (
    write_arg,
    write_constant_of_shape,
    write_cum_sum,
    write_expand,
    write_gather_elements,
    write_gather_nd,
    write_one_hot,
    write_tile,
    write_top_k,
    write_trilu,
    write_where,
)
from edgeq.backends.litert.operators.elements import (
    write_cast,
    write_clamp,
    write_gelu,
    write_hard_sigmoid,
    write_leaky,
    write_prelu,
    write_softmax,
    write_unary,
)
from edgeq.backends.litert.operators.formulas import (
    FORMULAS,
    write_elu,
    write_formula,
    write_log_sum_exp,
    write_lp_norm,
    write_lrn,
    write_mean_of,
    write_norm,
    write_pow,
    write_sum_of,
)
from edgeq.backends.litert.operators.images import write_depth_to_space, write_pool, write_resize, write_space_to_depth
from edgeq.backends.litert.operators.movement import write_concat, write_identity, write_reshape, write_transpose
from edgeq.backends.litert.operators.products import write_conv, write_conv_transpose, write_gemm, write_matmul
from edgeq.backends.litert.operators.reductions import write_mean
from edgeq.backends.litert.operators.slicing import write_gather, write_pad_node, write_slice, write_split

# Operators of two tensors that the file has under another name. Xor is NOT_EQUAL of truth values.
_BROADCAST = {
    "Add": "ADD",
    "And": "LOGICAL_AND",
    "Div": "DIV",
    "Equal": "EQUAL",
    "Greater": "GREATER",
    "GreaterOrEqual": "GREATER_EQUAL",
    "Less": "LESS",
    "LessOrEqual": "LESS_EQUAL",
    "Max": "MAXIMUM",
    "Min": "MINIMUM",
    "Mul": "MUL",
    "Or": "LOGICAL_OR",
    "Sub": "SUB",
    "Sum": "ADD",
    "Xor": "NOT_EQUAL",
}
# Global pooling is a reduction over rows and columns.
_REDUCTIONS = (
    "GlobalAveragePool",
    "GlobalMaxPool",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
)
_ALIKE: dict[str, Callable[[Lowering, ir.Node], None]] = {
    **{name: write_binary(kind) for name, kind in _BROADCAST.items()},
    **{
        name: write_unary(kind)
        for name, kind in {
            "Sigmoid": "LOGISTIC",
            "Tanh": "TANH",
            "HardSwish": "HARD_SWISH",
            "Exp": "EXP",
            "Sqrt": "SQRT",
            "Abs": "ABS",
            "Neg": "NEG",
            "Log": "LOG",
            "Sin": "SIN",
            "Ceil": "CEIL",
            "Cos": "COS",
            "Floor": "FLOOR",
            "Not": "LOGICAL_NOT",
            "Round": "ROUND",
            "Sign": "SIGN",
        }.items()
    },
    # A Relu is a Clip with one bound.
    **dict.fromkeys(("Relu", "Clip"), write_clamp),
    # The shapes are known by now, so it does not matter which operator states them.
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), write_reshape),
    # In inference, a Dropout has no effect.
    **dict.fromkeys(("Identity", "Dropout"), write_identity),
    **dict.fromkeys(("MaxPool", "AveragePool"), write_pool),
    **dict.fromkeys(_REDUCTIONS, write_mean),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum"), write_sum_of),
    **dict.fromkeys(("LayerNormalization", "InstanceNormalization"), write_norm),
    **dict.fromkeys(("ArgMax", "ArgMin"), write_arg),
    **dict.fromkeys(FORMULAS, write_formula),
    **dict.fromkeys(("Softmax", "LogSoftmax"), write_softmax),
}

HANDLERS: dict[str, Callable[[Lowering, ir.Node], None]] = {
    **_ALIKE,
    "BatchNormalization": write_batch_norm,
    "Cast": write_cast,
    "Concat": write_concat,
    "ConstantOfShape": write_constant_of_shape,
    "Conv": write_conv,
    "ConvTranspose": write_conv_transpose,
    "CumSum": write_cum_sum,
    "DepthToSpace": write_depth_to_space,
    "Elu": write_elu,
    "Expand": write_expand,
    "Gather": write_gather,
    "GatherElements": write_gather_elements,
    "GatherND": write_gather_nd,
    "Gelu": write_gelu,
    "Gemm": write_gemm,
    "HardSigmoid": write_hard_sigmoid,
    "LRN": write_lrn,
    "LeakyRelu": write_leaky,
    "LpNormalization": write_lp_norm,
    "MatMul": write_matmul,
    "Mean": write_mean_of,
    "OneHot": write_one_hot,
    "PRelu": write_prelu,
    "Pad": write_pad_node,
    "Pow": write_pow,
    "ReduceLogSumExp": write_log_sum_exp,
    "Resize": write_resize,
    "Slice": write_slice,
    "SpaceToDepth": write_space_to_depth,
    "Split": write_split,
    "Tile": write_tile,
    "TopK": write_top_k,
    "Transpose": write_transpose,
    "Trilu": write_trilu,
    "Where": write_where,
}
