"""Write each ONNX operator as layers of ncnn. One function covers one kind of operator."""

from __future__ import annotations

from functools import cache

from edgeq.backends.ncnn.dialect import dialect
from edgeq.backends.ncnn.lower import Handler
from edgeq.backends.ncnn.operators.arithmetic import write_binary, write_pow
from edgeq.backends.ncnn.operators.elements import (
    write_clip,
    write_element,
    write_elu,
    write_gelu,
    write_hard,
    write_leaky_relu,
    write_prelu,
    write_softmax,
    write_unary,
)
from edgeq.backends.ncnn.operators.images import write_depth_to_space, write_pad, write_resize, write_space_to_depth
from edgeq.backends.ncnn.operators.movement import (
    write_alias,
    write_cast,
    write_concat,
    write_dropout,
    write_expand,
    write_tile,
    write_transpose,
)
from edgeq.backends.ncnn.operators.norms import (
    write_batch_norm,
    write_instance_norm,
    write_layer_norm,
    write_reduction,
)
from edgeq.backends.ncnn.operators.pooling import write_global_pool, write_pool
from edgeq.backends.ncnn.operators.products import write_conv, write_conv_transpose, write_gemm, write_matmul
from edgeq.backends.ncnn.operators.recurrent import write_recurrent
from edgeq.backends.ncnn.operators.slicing import write_gather, write_slice, write_split


@cache
def handlers() -> dict[str, Handler]:
    """Return ONNX operator → function that writes it."""
    table = dialect()
    return {
        **dict.fromkeys(table.unary, write_unary),
        **dict.fromkeys((*table.binary, "Sum"), write_binary),
        **dict.fromkeys(table.elements, write_element),
        **dict.fromkeys(table.reduction, write_reduction),
        # The elements keep their order, so it does not matter which operator states the shape.
        **dict.fromkeys(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"), write_alias),
        **dict.fromkeys(("AveragePool", "MaxPool"), write_pool),
        **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), write_global_pool),
        **dict.fromkeys(("GRU", "LSTM"), write_recurrent),
        **dict.fromkeys(("HardSigmoid", "HardSwish"), write_hard),
        **dict.fromkeys(("Resize", "Upsample"), write_resize),
        "BatchNormalization": write_batch_norm,
        "Cast": write_cast,
        "Clip": write_clip,
        "Concat": write_concat,
        "Conv": write_conv,
        "ConvTranspose": write_conv_transpose,
        "DepthToSpace": write_depth_to_space,
        "Dropout": write_dropout,
        "Elu": write_elu,
        "Expand": write_expand,
        "Gather": write_gather,
        "Gelu": write_gelu,
        "Gemm": write_gemm,
        "InstanceNormalization": write_instance_norm,
        "LayerNormalization": write_layer_norm,
        "LeakyRelu": write_leaky_relu,
        "MatMul": write_matmul,
        "PRelu": write_prelu,
        "Pad": write_pad,
        "Pow": write_pow,
        "Slice": write_slice,
        "Softmax": write_softmax,
        "SpaceToDepth": write_space_to_depth,
        "Split": write_split,
        "Tile": write_tile,
        "Transpose": write_transpose,
    }
