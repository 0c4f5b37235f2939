"""Whether a target's kernels take a quantized model as it is: zero points, and one scale or one for each channel.

Neither can be changed without other numbers: integers around another zero point reach further to one side than integers
around 0 do.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir

from edgeq.backends import backend_for
from edgeq.errors import ModelError, UsageError
from edgeq.graph.quant_params import LIMITS
from edgeq.graph.query import every_node
from edgeq.hardware.target import Target
from edgeq.retarget.read import Form, places


class _Trait(NamedTuple):
    """What tensors of a model are: `value` of a scheme's `field`, in `words`."""

    field: str
    value: bool
    words: str


_SKEWED_WEIGHT = _Trait("weight_symmetric", False, "weights with a zero point other than 0")
_SKEWED = _Trait("activation_symmetric", False, "activations with a zero point other than 0")
_PER_CHANNEL = _Trait("per_channel", True, "weights with a scale for each channel")


def check_target(model: ir.Model, target: Target, given: Path, before: Form) -> None:
    """Refuse a model with what the backend of `target` would refuse to build.

    Args:
        given, before: the file that is retargeted, and its form.

    Raises:
        ModelError: how many tensors have what, the first of them, and why the target does not take it.
    """
    backend, scheme = backend_for(target), target.profile.scheme
    problems, reasons = [], []
    for trait, tensors in _traits(model).items():
        try:
            backend.check(scheme.replace(**{trait.field: trait.value}))
        except UsageError as error:
            problems.append(f"{len(tensors)} {trait.words} ({next(iter(tensors))!r} first)")
            reasons.append(target.profile.why.get(trait.field) or error.problem)
    if problems:
        source = given if backend.adopts_quantized and before.format == "QDQ" else "FLOAT.onnx"
        raise ModelError(
            f"{given} has {' and '.join(problems)}, which {target.name} does not take: "
            + "; ".join(dict.fromkeys(reasons)),
            f"Other scales need samples: `edgeq quantize {source} -t {target.name} --data SAMPLES -o OUT.onnx`",
        )


def _traits(model: ir.Model) -> dict[_Trait, dict[str, None]]:
    """The names of the tensors that have each of them."""
    found: dict[_Trait, dict[str, None]] = {}
    for place in (place for node in every_node(model) for place in places(node)):
        low, high = LIMITS[place.params.dtype]
        if (place.params.zero_point != (low + high + 1) // 2).any():
            found.setdefault(_SKEWED_WEIGHT if place.weight else _SKEWED, {})[place.tensor] = None
        if place.weight and place.params.per_channel:
            found.setdefault(_PER_CHANNEL, {})[place.tensor] = None
    return found
