"""Check an integer graph for what the runtime accepts silently and computes wrongly, or crashes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from edgeq.backends.espdl.chips import EspFamily, wide_kernels
from edgeq.backends.espdl.network import DEPTHWISE, EspGraph, EspNode
from edgeq.backends.espdl.products import largest_sum, shifts
from edgeq.errors import ModelError

# The runtime shifts an int of 32 bits by the exponent of a tensor.
_MOST_EXPONENT = 30
# Attributes that the runtime reads without a check whether they are there.
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "AveragePool": ("kernel_shape", "pads", "strides"),
    "Concat": ("axis",),
    "Conv": ("activation", "dilations", "group", "kernel_shape", "pads", "strides"),
    "Gemm": ("activation", "transA", "transB"),
    "MaxPool": ("kernel_shape", "pads", "strides"),
    "Reshape": ("allowzero",),
    "Softmax": ("axis",),
    "Transpose": ("perm",),
}


def check(graph: EspGraph, family: EspFamily) -> None:
    """Check every node of a graph for a family of chips.

    Raises:
        ModelError: a node breaks a rule; the message names the node and the rule.
    """
    for node in graph.nodes:
        for rule in (_attributes, _exponents, *_RULES.get(node.kind, ())):
            for problem in rule(node, family):
                raise ModelError(
                    f"node {node.source or node.name!r} ({node.kind}): {problem}",
                    "Report this with the model: edgeq must not write such a file",
                )


def _attributes(node: EspNode, family: EspFamily) -> Iterator[str]:
    del family
    for name in _REQUIRED.get(node.kind, ()):
        if name not in node.attributes:
            yield f"the attribute {name} is missing, which the runtime reads in any case"


def _exponents(node: EspNode, family: EspFamily) -> Iterator[str]:
    del family
    for tensor in (*node.data, *node.outputs):
        # The exponents of a bias are sums, and the runtime never shifts by them.
        if tensor.type in ("int8", "int16") and any(abs(e) > _MOST_EXPONENT for e in tensor.exponents):
            yield f"{tensor.name!r} has the exponent {max(tensor.exponents, key=abs)}, and the runtime takes ±30"


def _products(node: EspNode, family: EspFamily) -> Iterator[str]:
    if (shifts(node) < 0).any():
        yield "its sums would be shifted to the left, which the runtime does not do"
    weights = node.data[1]
    if len(weights.exponents) > 1 and not family.per_channel:
        yield "its weights have several exponents, and the kernels take one"
    if node.kind == "Conv" and weights.layout == DEPTHWISE and node.attributes["group"] != weights.shape[-2]:
        yield "its number of groups is neither 1 nor that of its channels"
    if weights.type != node.type:
        yield f"its weights are {weights.type} and its input is {node.type}"
    bits = wide_kernels().accumulator_bits
    if node.type == "int16" and largest_sum(node) >= 2 ** (bits - 1):
        yield f"a sum of its products may need more than {bits} bits"
    if len(node.data) > 2 and node.type == "int8":
        bias = node.data[2].values
        assert bias is not None
        limit = 2 ** (family.bias_bits - 1)
        if bias.min(initial=0) < -limit or bias.max(initial=0) >= limit:
            yield f"a bias needs more than {family.bias_bits} bits, to which the runtime cuts it"


def _equal_exponents(node: EspNode, family: EspFamily) -> Iterator[str]:
    del family
    tensors = [t for t in (*node.data, *node.outputs) if t.type in ("int8", "int16")]
    if len({(tensor.type, tensor.exponent) for tensor in tensors}) > 1:
        yield "its inputs and its output have different exponents"


def _softmax(node: EspNode, family: EspFamily) -> Iterator[str]:
    del family
    if node.type == "int8" and node.data[0].exponent > -1:
        yield "its exponent is not negative, so an exponential may be infinite"


_RULES: Mapping[str, tuple[Callable[[EspNode, EspFamily], Iterator[str]], ...]] = {
    "Add": (_equal_exponents,),
    "Concat": (_equal_exponents,),
    "Conv": (_products,),
    "Gemm": (_products,),
    "MaxPool": (_equal_exponents,),
    "Softmax": (_softmax,),
    "Sub": (_equal_exponents,),
}
