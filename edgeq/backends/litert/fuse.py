"""Merge clamps of 16-bit integers into the operators before them.

A clamp of 8-bit integers is part of the range of the operator before it, and costs nothing. Ranges of 16-bit integers
are symmetric, so there a Relu is an operator of its own, unless the operator before it applies the Relu to its result.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from edgeq.backends.litert.dialect import dialect
from edgeq.backends.litert.network import TfliteNetwork, TfliteOperator, TfliteTensor

_CLAMPS = ("RELU", "RELU6")
_OPTION = "fusedActivationFunction"


def fuse_activations(network: TfliteNetwork) -> TfliteNetwork:
    """Return the network in which operators apply the clamps that follow them, if they can and nothing else reads their
    results.
    """
    reads = Counter(tensor for operator in network.operators for tensor in operator.inputs)
    reads.update(port.tensor for port in network.outputs)
    operators: list[TfliteOperator] = []
    # Output of an operator → place of the operator in `operators`.
    places: dict[TfliteTensor, int] = {}
    for operator in network.operators:
        (source, *_), (result, *_) = operator.inputs or (None,), operator.outputs
        place = places.get(source) if source is not None else None
        if operator.kind in _CLAMPS and operator.type == "int16" and place is not None and reads[source] == 1:
            before = operators[place]
            if dialect()[before.kind].clamps and before.options.get(_OPTION, "NONE") == "NONE":
                options = {**before.options, _OPTION: operator.kind}
                operators[place] = replace(before, outputs=(result,), options=options)
                places[result] = place
                continue
        places.update(dict.fromkeys(operator.outputs, len(operators)))
        operators.append(operator)
    return replace(network, operators=tuple(operators))
