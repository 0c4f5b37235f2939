"""The `extra_options` of the older functions: which there are, and what becomes of each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np

from edgeq.compat.source import LOG
from edgeq.errors import UsageError

# Read by onnxruntime's quantizer, which writes the model here too.
WRITER = frozenset(
    {
        "ActivationRestrictedAsymmetric",
        "ActivationSymmetric",
        "AddQDQPairToWeight",
        "BlockSize",
        "DedicatedQDQPair",
        "DefaultTensorType",
        "EnableSubgraph",
        "ForceQuantizeNoInputCheck",
        "MatMulConstBOnly",
        "MinimumRealRange",
        "OpTypesToExcludeOutputQuantization",
        "QDQDisableWeightAdjustForInt32Bias",
        "QDQKeepRemovableActivations",
        "QDQOpTypePerChannelSupportToAxis",
        "QuantizeBias",
        "TensorQuantOverrides",
        "UseQDQContribOps",
        "WeightSymmetric",
        "extra.Sigmoid.nnapi",
    }
)
# Read by edgeq's calibration.
CALIBRATION = frozenset(
    {
        "CalibMaxIntermediateOutputs",
        "CalibMovingAverage",
        "CalibMovingAverageConstant",
        "CalibPercentile",
        "CalibStridedMinMax",
        "CalibTensorRangeSymmetric",
    }
)
_SMOOTH = ("SmoothQuant", "SmoothQuantAlpha", "SmoothQuantFolding")


def check_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the options.

    Unknown keys are ignored, as they always were, but no longer in silence.

    Raises:
        UsageError: they are no mapping, or SmoothQuant is set, which no release of its dependency has.
    """
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"extra_options are given as {type(given).__name__}", "Give a dict of names and values")
    options = dict(given or {})
    if options.get("SmoothQuant"):
        raise UsageError(
            "the extra option SmoothQuant needs a module of neural-compressor that its releases no longer have",
            "Leave it out; `edgeq tune` finds the layers to keep in float instead",
        )
    known = WRITER | CALIBRATION | set(_SMOOTH)
    for name in sorted(set(options) - known):
        close = difflib.get_close_matches(name, known, n=1)
        LOG.warning("unknown extra option %r is ignored%s", name, f"; did you mean {close[0]}?" if close else "")
    return options


def writer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What is left for the quantizer that writes the model; `None` means not set."""
    chosen = {name: value for name, value in options.items() if name in WRITER and value is not None}
    if "TensorQuantOverrides" in chosen:
        chosen["TensorQuantOverrides"] = {
            tensor: [{key: _array(value) for key, value in override.items()} for override in overrides]
            for tensor, overrides in chosen["TensorQuantOverrides"].items()
        }
    return chosen


def _array(value: Any) -> Any:
    """numpy's scalars as arrays, which the quantizer insists on."""
    return np.asarray(value) if isinstance(value, np.generic) else value
