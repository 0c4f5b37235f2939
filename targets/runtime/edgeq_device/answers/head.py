"""Say how a model's outputs become answers, as data. A bundle stores a head as JSON next to its preprocessing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Dict, Mapping, Tuple

from edgeq_device.errors import BundleError

_KEYS = frozenset({"family", "outputs", "parameters", "thresholds", "keypoint_names", "source"})
# Far above real heads. A bundle is untrusted.
_MOST_ENTRIES, _LONGEST = 4096, 256


@dataclass(frozen=True)
class Head:
    """Describe the head of one model.

    Attributes:
        family: name of the family, whose code decodes the outputs.
        outputs: role in the family ("rows", "protos") → name of the model's output.
        parameters: what the family must know besides the outputs' shapes, such as {"unit": "input"}. Values are JSON
            values; the family defines the keys and checks the values.
        thresholds: threshold → number, such as {"confidence": 0.25, "iou": 0.7, "limit": 300}. "iou" is absent if the
            model suppresses overlapping boxes itself.
        labels: name of each class; may be empty. A bundle stores them in labels.txt.
        keypoint_names: name of each keypoint; may be empty.
        source: fact ("family", "labels", "thresholds") → where it comes from, for people.
    """

    family: str
    outputs: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    labels: Tuple[str, ...] = ()
    keypoint_names: Tuple[str, ...] = ()
    source: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> Dict[str, Any]:
        """Return the record that a bundle stores. The labels are in a file of their own."""
        record: Dict[str, Any] = {"family": self.family, "outputs": dict(self.outputs)}
        optional = {
            "parameters": dict(self.parameters),
            "thresholds": dict(self.thresholds),
            "keypoint_names": list(self.keypoint_names),
            "source": dict(self.source),
        }
        return {**record, **{key: value for key, value in optional.items() if value}}


def parse_head(record: object, labels: Tuple[str, ...] = (), context: str = "head") -> Head:
    """Check a bundle's record and return the head.

    Raises:
        BundleError: the record is not a head, or its family is unknown to this runner.
    """
    if not isinstance(record, dict) or set(record) - _KEYS or not isinstance(record.get("family"), str):
        raise BundleError(f"{context} is not the record of a head", "Use the edgeq version that made the bundle")
    texts = {key: _parse_texts(record.get(key, {}), f"{context}.{key}") for key in ("outputs", "source")}
    thresholds = record.get("thresholds", {})
    if not isinstance(thresholds, dict) or not all(_is_number(value) for value in thresholds.values()):
        raise BundleError(f"{context}.thresholds is not an object of numbers")
    names = record.get("keypoint_names", [])
    if not isinstance(names, list) or len(names) > _MOST_ENTRIES or not all(isinstance(name, str) for name in names):
        raise BundleError(f"{context}.keypoint_names is not a list of names")
    parameters = record.get("parameters", {})
    if not isinstance(parameters, dict) or len(parameters) > _MOST_ENTRIES:
        raise BundleError(f"{context}.parameters is not an object")
    return Head(
        record["family"],
        texts["outputs"],
        parameters,
        {str(key): float(value) for key, value in thresholds.items()},
        labels,
        tuple(names),
        texts["source"],
    )


def _parse_texts(value: object, context: str) -> Dict[str, str]:
    if not isinstance(value, dict) or len(value) > _MOST_ENTRIES:
        raise BundleError(f"{context} is not an object")
    if not all(isinstance(text, str) for text in value.values()):
        raise BundleError(f"{context} contains a value that is not text")
    return dict(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
