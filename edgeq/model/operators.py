"""What each operator does with its inputs: one table, a row an operator.

Places count a node's inputs from 0. Operators of ONNX itself, of ONNX Runtime's `com.microsoft` and those that its
optimiser makes are rows of one table, by type: a type means the same in every domain, but for those in `_BY_DOMAIN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import onnx_ir as ir

from edgeq.model.graph import MAIN_DOMAINS, MICROSOFT

MacRule = Literal[
    "", "conv", "conv-transpose", "matmul", "recurrent", "einsum", "attention", "fused-attention", "nbits"
]
Movement = Literal["", "permutes", "selects"]


@dataclass(frozen=True)
class IntegerInput:
    """An input that holds integers, and the inputs that give their scale and zero point.

    Attributes:
        value: place of the integers.
        scale: place of the scale; None where the node gives plain integer sums, to be scaled behind it.
        zero_point: place of the zero point.
    """

    value: int
    scale: int | None
    zero_point: int


@dataclass(frozen=True)
class Operator:
    """One row.

    Attributes:
        op_type: its name.
        activations: places of the data that changes from sample to sample.
        weights: places of the operands that are weights where they are constant; the first is the one that a layer is
            known by.
        bias: place of the bias, in units of the products.
        integers: integer inputs, the activation's before the weight's. `integer_inputs` also knows those of operators
            with any number of inputs.
        integer_output: places of the scale and the zero point of an integer output.
        float_form: for an integer operator, the one that computes the same on floats.
        dynamic: takes floats, and measures their range itself when it runs.
        mac_rule: how its multiply-accumulates are counted, see `edgeq.model.macs`; "" where it multiplies no matrices.
        mac_operands: places of the operands whose shapes the rule uses; () for all inputs.
        movement: of operators that compute nothing: "permutes" where every element appears once in the output,
            "selects" where some are left out, repeated or put beside a constant. Integers behind mean what those in
            front mean.
        elementwise: each element of the output is computed from the elements at the same place of the activations.
    """

    op_type: str
    activations: tuple[int, ...] = (0,)
    weights: tuple[int, ...] = ()
    bias: int | None = None
    integers: tuple[IntegerInput, ...] = ()
    integer_output: tuple[int, int] | None = None
    float_form: str = ""
    dynamic: bool = False
    mac_rule: MacRule = ""
    mac_operands: tuple[int, ...] = (0, 1)
    movement: Movement = ""
    elementwise: bool = False

    @property
    def quantized(self) -> bool:
        """Whether it only occurs in quantized models."""
        return bool(self.integers or self.integer_output or self.dynamic)

    @property
    def weight(self) -> int | None:
        """Place of the weight that a layer is known by."""
        return self.weights[0] if self.weights else None


def _rows(op_types: str, row: Operator) -> Iterable[tuple[str, Operator]]:
    return ((op_type, replace(row, op_type=op_type)) for op_type in op_types.split())


def _integers(*places: tuple[int, int | None, int]) -> tuple[IntegerInput, ...]:
    return tuple(IntegerInput(*place) for place in places)


_FUNCTION = Operator("", elementwise=True)
_LAYER = Operator("", weights=(1,), bias=2)
_CONV = replace(_LAYER, mac_rule="conv")
_MATMUL = replace(_LAYER, bias=None, mac_rule="matmul")
_PAIR = _integers((0, 1, 2), (3, 4, 5))
_SUM = Operator("", (0, 3), integers=_PAIR, integer_output=(6, 7))
_QLINEAR = Operator("", weights=(3,), integers=_PAIR, integer_output=(6, 7), mac_operands=(0, 3))
_INTEGER_SUMS = Operator("", weights=(1,), integers=_integers((0, None, 2), (1, None, 3)))
_RECURRENT = Operator("", weights=(1, 2), bias=3, mac_rule="recurrent")
# The input, and one weight for Q, K and V.
_ATTENTION = replace(_LAYER, mac_rule="fused-attention")

OPERATORS: Mapping[str, Operator] = dict(
    (
        *_rows("Conv FusedConv NhwcFusedConv", _CONV),
        *_rows("ConvTranspose", replace(_LAYER, mac_rule="conv-transpose")),
        *_rows("Gemm FusedGemm", replace(_LAYER, mac_rule="matmul")),
        *_rows("MatMul FusedMatMul", _MATMUL),
        *_rows("RNN GRU LSTM", _RECURRENT),
        *_rows("Einsum", Operator("", activations=(0, 1), mac_rule="einsum", mac_operands=())),
        *_rows(
            "Attention MultiHeadAttention",
            Operator("", activations=(0, 1, 2), mac_rule="attention", mac_operands=(0, 1, 2)),
        ),
        *_rows("MatMulNBits", replace(_MATMUL, mac_rule="nbits")),
        *_rows("Add Mul Sub Div Max Min Pow", Operator("", activations=(0, 1), elementwise=True)),
        *_rows("Abs Celu Clip Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Log Mish Neg QuickGelu", _FUNCTION),
        *_rows("Reciprocal Relu Selu Sigmoid Softplus Softsign Sqrt Swish Tanh ThresholdedRelu", _FUNCTION),
        *_rows("Where", Operator("", activations=(1, 2))),
        # Quantizing and back.
        *_rows("QuantizeLinear", Operator("", integer_output=(1, 2))),
        *_rows("DequantizeLinear", Operator("", integers=_integers((0, 1, 2)))),
        *_rows("DynamicQuantizeLinear", Operator("", dynamic=True)),
        # Integers in, integers out.
        *_rows("QLinearConv", replace(_QLINEAR, bias=8, float_form="Conv", mac_rule="conv")),
        *_rows("QLinearMatMul", replace(_QLINEAR, float_form="MatMul", mac_rule="matmul")),
        *_rows("QGemm", replace(_QLINEAR, bias=6, integer_output=(7, 8), float_form="Gemm", mac_rule="matmul")),
        *_rows("QLinearAdd", replace(_SUM, float_form="Add")),
        *_rows("QLinearMul", replace(_SUM, float_form="Mul")),
        *_rows(
            "QLinearWhere",
            Operator("", (1, 4), integers=_integers((1, 2, 3), (4, 5, 6)), integer_output=(7, 8), float_form="Where"),
        ),
        *(
            row
            for form in ["Sigmoid", "LeakyRelu", "Softmax", "ReduceMean", "AveragePool", "GlobalAveragePool"]
            for row in _rows(
                f"QLinear{form}",
                Operator("", integers=_integers((0, 1, 2)), integer_output=(3, 4), float_form=form),
            )
        ),
        *_rows("QLinearConcat", Operator("", activations=(), integer_output=(0, 1), float_form="Concat")),
        # Integer sums, or floats made of them.
        *_rows("ConvInteger", replace(_INTEGER_SUMS, float_form="Conv", mac_rule="conv")),
        *_rows("ConvIntegerToFloat", replace(_INTEGER_SUMS, float_form="Conv", mac_rule="conv")),
        *_rows("MatMulInteger", replace(_INTEGER_SUMS, float_form="MatMul", mac_rule="matmul")),
        *_rows("MatMulIntegerToFloat", replace(_MATMUL, integers=_integers((0, 2, 4), (1, 3, 5)), float_form="MatMul")),
        *_rows("QAttention", replace(_ATTENTION, bias=None, integers=_integers((0, 3, 6), (1, 4, 7)))),
        # Floats in, quantized when the model runs.
        *_rows(
            "DynamicQuantizeMatMul", replace(_MATMUL, integers=_integers((1, 2, 3)), float_form="MatMul", dynamic=True)
        ),
        *_rows(
            "DynamicQuantizeLSTM",
            replace(_RECURRENT, integers=_integers((1, 8, 9), (2, 10, 11)), float_form="LSTM", dynamic=True),
        ),
        *_rows("QMoE QEmbedLayerNormalization", Operator("", dynamic=True)),
        # Data movement.
        *_rows(
            "Reshape Flatten Squeeze Unsqueeze Transpose DepthToSpace SpaceToDepth",
            Operator("", movement="permutes"),
        ),
        *_rows("Identity", Operator("", movement="permutes", elementwise=True)),
        *_rows("Expand Gather MaxPool Pad Resize Slice Split Tile", Operator("", movement="selects")),
    )
)
_BY_DOMAIN: Mapping[tuple[str, str], Operator] = {
    (MICROSOFT, "Attention"): replace(_ATTENTION, op_type="Attention"),
}

DATA_MOVEMENT = frozenset(op_type for op_type, row in OPERATORS.items() if row.movement)
"""Operator types whose integer kernels copy values and cannot rescale them."""
PERMUTATIONS = frozenset(op_type for op_type, row in OPERATORS.items() if row.movement == "permutes")
"""Those of `DATA_MOVEMENT` in whose output every element of the data appears once."""


def operator_of(node: ir.Node) -> Operator:
    """The row of a node; for an operator without one, a row in which just the first input is known to be data."""
    found = _BY_DOMAIN.get((node.domain, node.op_type)) or OPERATORS.get(node.op_type)
    return found or Operator(node.op_type)


def moves_data(node: ir.Node) -> bool:
    """Whether a node only moves elements of its input, or puts a constant beside them: one of `DATA_MOVEMENT` that does
    not compute new numbers between them."""
    if node.domain not in MAIN_DOMAINS or node.op_type not in DATA_MOVEMENT:
        return False
    crops = node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    return node.op_type != "Resize" or (node.attributes.get_string("mode", "nearest") == "nearest" and not crops)


def integer_inputs(node: ir.Node) -> tuple[IntegerInput, ...]:
    """The integer inputs of a node, those of an operator with any number of inputs included."""
    if node.op_type == "QLinearConcat":
        return tuple(IntegerInput(place, place + 1, place + 2) for place in range(2, len(node.inputs), 3))
    return operator_of(node).integers


def is_quantized_operator(op_type: str) -> bool:
    """Whether an operator of this type occurs in quantized models only."""
    row = OPERATORS.get(op_type)
    return op_type.startswith("QLinear") or (row is not None and (row.quantized or row.mac_rule == "nbits"))


def is_depthwise(node: ir.Node, weight: tuple[int, ...]) -> bool:
    """Whether each output channel of a convolution with a weight [O, I / group, ...] reads one input channel."""
    return weight[1] == 1 and weight[0] == node.attributes.get_int("group", 1)


def channel_axis(node: ir.Node) -> int:
    """Along which axis of a node's weight (of the data, for Q/DQ) a scale per channel runs; may be negative."""
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        return int(node.attributes.get_int("axis", 1))
    row = operator_of(node)
    float_form = row.float_form or row.op_type
    if float_form in ("Gemm", "FusedGemm"):
        return 0 if node.attributes.get_int("transB", 0) else -1
    if float_form == "ConvTranspose":
        return 1
    return 0 if row.mac_rule in ("conv", "recurrent") else -1
