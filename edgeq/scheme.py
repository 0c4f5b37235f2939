"""Describe how to quantize. A profile chooses the settings, a user overrides them, and a backend applies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from edgeq.errors import UsageError
from edgeq.util.display import Displayed
from edgeq.util.registry import METHODS

Mode = Literal["static", "dynamic", "weight-only", "float"]
Format = Literal["QDQ", "QOperator", "table"]
FloatType = Literal["float32", "float16", "bfloat16"]
IntegerType = Literal["int8", "uint8"]
ScaleForm = Literal["any", "power-of-two"]
BIAS_BITS = (8, 20, 32, 40, 64)
"""The widths of biases that hardware stores, in bits."""
# Integers of these sizes fill bytes without gaps, as MatMulNBits stores them.
WEIGHT_BITS = (4, 8)
# The sizes that MatMulNBits accepts. Larger blocks need fewer scales and add more noise.
BLOCK_SIZES = (16, 32, 64, 128, 256)
SYMMETRIC_BLOCKS = {4: False, 8: True}
"""Whether the zero point of a block of weights is in the middle of the range, for each number of bits. A zero point in
the middle leaves one or two steps unused in a block whose weights are not centred. With 4 bits (16 steps), that adds a
tenth to the block's noise. With 8 bits (256 steps), it adds nothing.
"""
ALL_NODES = "*"
"""Value that means every node, instead of a list of names."""
ON_REQUEST = "kept in float on request"
"""The reason for a node that the user keeps in float."""
WEIGHT_ONLY_TYPES = ("Gather", "Gemm", "MatMul")
"""Operator types that weight-only quantization supports."""


@dataclass(frozen=True)
class Scheme(Displayed):
    """Describe one way to quantize a model.

    Attributes:
        mode: "static" (activation ranges from calibration), "dynamic" (ranges measured at run time), "weight-only"
            (constant matrices as blocks of integers, activations in the type that the kernel prefers) or "float" (the
            unchanged model, for an engine that computes it faster).
        format: "QDQ" (QuantizeLinear/DequantizeLinear pairs), "QOperator" (QLinearConv and similar operators) or
            "table" (the float model, and a calibration table with which the runtime quantizes the model).
        activation_type, weight_type: integer types.
        activation_symmetric, weight_symmetric: whether the zero point is in the middle of the integer range.
        per_channel: whether each output channel of a weight has its own scale.
        scale: "any", or "power-of-two" for hardware that rescales by shifts. Every scale is then rounded up to a power
            of two, and symmetric activations use the smallest integer as well (-128 of int8).
        bias_bits: width of the largest bias, in bits. A file stores biases in at most 32 bits.
        fused: types of operators, such as Relu, that the hardware computes together with the layer before. The file has
            no Q/DQ pair between the two.
        reduce_range: whether weights have only 7 bits, for kernels that add two products in 16 bits.
        fit_pairs: whether to fit 8-bit weights to kernels that add two products in 16 bits. If two neighbouring weights
            could overflow the 16-bit sum, the scale of their output channel grows just enough to prevent it. This is as
            safe as `reduce_range`, with a fraction of its noise.
        fit_seen: with `fit_pairs`, whether scales grow only as far as the calibration samples need, with a margin of a
            tenth. This adds hardly any noise, but sums that overflow on other samples are clipped.
        method: name of any registered calibration method, which derives ranges from the statistics.
        method_options: parameters of the method, for example {"percentile": 99.99}.
        op_types: operator types to quantize; None means every type that the backend can quantize.
        exclude: names of nodes kept in float.
        exclude_reasons: why edgeq itself keeps nodes of `exclude` in float, by node. The user named the other nodes.
        wide: names of nodes that compute on 16-bit activations, for hardware that has such kernels; "*" means every
            node. Their weights have 8 bits, or 16 if the backend's `widens_weights` says so.
        dynamic_weight_types: weight type of each operator type in dynamic mode; operator types without an entry stay in
            float.
        rest: float type of everything in the file that is not quantized.
        stored_types: operator types that compute in float, but whose weights are 8-bit integers in the file.
        weight_bits, block_size: in weight-only mode, bits per weight, and number of weights that share a scale.
        eight_bit: in weight-only mode, names of nodes whose weights have 8 bits, whatever `weight_bits` is.
        float_compute: in weight-only mode, names of nodes that compute in float, or "*" for all nodes with 4-bit
            weights. None means the nodes where, on the calibration samples, int8 activations add more noise than the
            4-bit weights do.
        session_options: ONNX Runtime session configuration entries that the artifact needs to be correct, and that ship
            with it.
    """

    mode: Mode = "static"
    format: Format = "QDQ"
    activation_type: IntegerType = "uint8"
    weight_type: IntegerType = "int8"
    activation_symmetric: bool = False
    weight_symmetric: bool = True
    per_channel: bool = True
    scale: ScaleForm = "any"
    bias_bits: int = 32
    fused: tuple[str, ...] = ()
    reduce_range: bool = False
    fit_pairs: bool = False
    fit_seen: bool = False
    method: str = "minmax"
    method_options: Mapping[str, int | float] = field(default_factory=dict)
    op_types: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    exclude_reasons: Mapping[str, str] = field(default_factory=dict)
    wide: tuple[str, ...] = ()
    dynamic_weight_types: Mapping[str, IntegerType] = field(default_factory=dict)
    rest: FloatType = "float32"
    stored_types: tuple[str, ...] = ()
    weight_bits: int = 8
    block_size: int = 32
    eight_bit: tuple[str, ...] = ()
    float_compute: tuple[str, ...] | None = None
    session_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, get_args(Mode))
        _one_of("format", self.format, get_args(Format))
        _one_of("activation_type", self.activation_type, get_args(IntegerType))
        _one_of("weight_type", self.weight_type, get_args(IntegerType))
        _one_of("rest", self.rest, get_args(FloatType))
        # Plug-ins may register methods, so the names are not known to a type checker.
        METHODS.check(self.method)
        _one_of("scale", self.scale, get_args(ScaleForm))
        _one_of("bias_bits", self.bias_bits, BIAS_BITS)
        _one_of("weight_bits", self.weight_bits, WEIGHT_BITS)
        _one_of("block_size", self.block_size, BLOCK_SIZES)
        for op_type, weight_type in self.dynamic_weight_types.items():
            _one_of(f"dynamic_weight_types.{op_type}", weight_type, get_args(IntegerType))
        reasons = {name: reason for name, reason in self.exclude_reasons.items() if name in self.exclude}
        # A frozen dataclass is set this way only while it is made.
        object.__setattr__(self, "exclude_reasons", reasons)
        # Mappings become read-only, so that schemes can be shared and used as keys.
        for name in ("method_options", "dynamic_weight_types", "session_options", "exclude_reasons"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        # Sorted, so that equal choices give equal schemes and equal records.
        for name in ("exclude", "wide", "stored_types", "eight_bit", "fused"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        for name in ("op_types", "float_compute"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))

    @property
    def pair(self) -> str:
        """Return the activation and weight types in the usual short form, such as "U8S8"."""
        short = {"uint8": "U8", "int8": "S8"}
        return short[self.activation_type] + short[self.weight_type]

    @property
    def quantized_types(self) -> frozenset[str] | None:
        """Return the operator types that the scheme quantizes; None means every type that the backend can quantize."""
        # Only static mode leaves the choice of types to the rules of the backend.
        if self.mode == "static":
            return frozenset(self.op_types) if self.op_types is not None else None
        if self.mode == "float":
            return frozenset()
        types = frozenset(self.dynamic_weight_types if self.mode == "dynamic" else WEIGHT_ONLY_TYPES)
        return types if self.op_types is None else types & frozenset(self.op_types)

    @property
    def title(self) -> str:
        """Return a short description of the scheme, such as "static QDQ U8S8", "dynamic (Gemm int8, MatMul int8)" or
        "weight-only 4 bits".
        """
        if self.mode == "static":
            wide = f", {_nodes(self.wide)} on 16-bit activations" if self.wide else ""
            scales = ", power-of-two scales" if self.scale == "power-of-two" else ""
            return f"static {self.format} {self.pair}{scales}{wide}"
        if self.mode == "float":
            return "not quantized"
        if self.mode == "weight-only":
            finer = f", {len(self.eight_bit)} nodes 8" if self.eight_bit else ""
            in_float = "" if not self.float_compute else f", float compute in {_nodes(self.float_compute)}"
            return f"weight-only {self.weight_bits} bits{finer}{in_float}"
        types = sorted(self.quantized_types or ())
        return f"dynamic ({', '.join(f'{t} {self.dynamic_weight_types[t]}' for t in types)})"

    @property
    def excluded(self) -> Mapping[str, str]:
        """Return the reason for each node of `exclude`."""
        return {name: self.exclude_reasons.get(name, ON_REQUEST) for name in self.exclude}

    def keep_in_float(self, nodes: Iterable[str], reason: str) -> Scheme:
        """Return a copy that also keeps `nodes` in float. Nodes that are in float already keep their reason."""
        # The first reason for a node stays, because it is why the node was excluded.
        new = [name for name in nodes if name not in self.exclude]
        reasons = {**self.exclude_reasons, **dict.fromkeys(new, reason)}
        return self.replace(exclude=(*self.exclude, *new), exclude_reasons=reasons)

    def replace(self, **changes: Any) -> Scheme:
        """Return a copy with `changes`. A value of None leaves its field unchanged, so callers can pass options that
        are not set.
        """
        return dataclasses.replace(self, **{k: v for k, v in changes.items() if v is not None})

    def equals_but_options(self, scheme: Scheme) -> bool:
        """Return whether the two schemes are equal, apart from their session options."""
        return self.replace(session_options=scheme.session_options) == scheme


def _nodes(names: tuple[str, ...]) -> str:
    return "all nodes" if ALL_NODES in names else f"{len(names)} node{'' if len(names) == 1 else 's'}"


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"scheme {name} is {value!r}", f"It can be {', '.join(map(str, allowed))}")
