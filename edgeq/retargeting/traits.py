"""Check whether a target's kernels accept the zero points of a quantized model and its kind of scales.

Retargeting cannot change either of these without changing numbers. For example, with a zero point other than 0,
integers reach further to one side than to the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir

from edgeq.backends.base import backend_for
from edgeq.errors import ModelError, UsageError
from edgeq.hardware.target import Target
from edgeq.model.graph import every_node
from edgeq.model.quant_params import LIMITS
from edgeq.retargeting.read import Form, quantized_inputs


class _Trait(NamedTuple):
    """Describe a property of tensors. `words` name the property in messages. A scheme has the property if its field
    `field` has the value `value`.
    """

    field: str
    value: bool
    words: str


_SKEWED_WEIGHT = _Trait("weight_symmetric", False, "weights with a zero point other than 0")
_SKEWED = _Trait("activation_symmetric", False, "activations with a zero point other than 0")
_PER_CHANNEL = _Trait("per_channel", True, "weights with a scale for each channel")


def check_target(model: ir.Model, target: Target, model_path: Path, source_form: Form) -> None:
    """Refuse a model with a property that the backend of `target` does not support.

    Args:
        model_path: the file to retarget.
        source_form: the form of that file.

    Raises:
        ModelError: the target does not support a property; the message states the number of tensors, the first of them,
            and the reason.
    """
    backend, scheme = backend_for(target), target.profile.scheme
    problems, reasons = [], []
    for trait, tensors in _traits(model).items():
        try:
            # The backend knows which schemes it supports, so the same check decides for models from other tools.
            backend.check(scheme.replace(**{trait.field: trait.value}))
        except UsageError as error:
            problems.append(f"{len(tensors)} {trait.words} ({next(iter(tensors))!r} first)")
            reasons.append(target.profile.why.get(trait.field) or error.problem)
    if problems:
        # Only some backends can start from a quantized model. For the others, the user needs the float model.
        source = model_path if backend.adopts_quantized and source_form.format == "QDQ" else "FLOAT.onnx"
        raise ModelError(
            f"{model_path} has {' and '.join(problems)}, which {target.name} does not support: "
            + "; ".join(dict.fromkeys(reasons)),
            f"Other scales need samples: `edgeq quantize {source} -t {target.name} ⟨data⟩ SAMPLES -o OUT.onnx`",
        )


def _traits(model: ir.Model) -> dict[_Trait, dict[str, None]]:
    """Return each property that some tensors have, with the names of these tensors."""
    traits: dict[_Trait, dict[str, None]] = {}
    for place in (place for node in every_node(model) for place in quantized_inputs(node)):
        low, high = LIMITS[place.params.dtype]
        # The middle of the type is 0 for int8 and 128 for uint8.
        if (place.params.zero_point != (low + high + 1) // 2).any():
            traits.setdefault(_SKEWED_WEIGHT if place.weight else _SKEWED, {})[place.tensor] = None
        if place.weight and place.params.per_channel:
            traits.setdefault(_PER_CHANNEL, {})[place.tensor] = None
    return traits
