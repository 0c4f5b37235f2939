"""Define what a family of heads is, and find families by name."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Callable, Iterator, Mapping, Optional, Tuple

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.errors import BundleError
from edgeq_device.prepare.frame import Frame

Outputs = Mapping[str, Any]
"""Output name → array, for one run of the model."""


@dataclass(frozen=True)
class View:
    """Hold what is known about a model when its head is looked for.

    Attributes:
        outputs: the float model's outputs for one real image or one real input, by name, in the model's order.
        size: (width, height) of the model's image input; (0, 0) if the input is not an image.
        classes: number of classes, if labels or metadata state it.
        keypoints: (number of keypoints, values for each), if metadata states it.
        hints: further facts that a file states about the model, such as {"boxes": "corners"}.
        labels: names of the classes; empty if nothing states them.
        inputs: the inputs of this run by name, in the model's order.
        forced: whether the user has named the family. The shapes of the outputs suffice then.
        named: whether the user or a file names this family or its task. Shapes that other families share suffice then.
    """

    outputs: Outputs
    size: Tuple[int, int]
    classes: Optional[int] = None
    keypoints: Optional[Tuple[int, int]] = None
    hints: Mapping[str, Any] = field(default_factory=dict)
    labels: Tuple[str, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    forced: bool = False
    named: bool = False


@dataclass(frozen=True)
class Fit:
    """Say how a family reads a model: role → output name, and the family's parameters."""

    outputs: Mapping[str, str]
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """Describe one family of heads, and decode its outputs.

    Attributes:
        name: name of the family, such as "yolo-seg".
        task: "detect", "segment", "pose", "obb", "classify", "multi-label", "semantic", "matting", "depth", "image",
            "text", "text-detect", "voice", "embedding", "anomaly" or "regression".
        title: the outputs that the family reads, with their shapes, in a few words.
        fit: returns how the family reads the outputs of a view, or None if they do not belong to it. It checks shapes
            and the bounds of values, and does not raise.
        decode: returns the answer for one input, from the model's outputs, its head and the frame of the image. It
            raises ValueError, KeyError, TypeError or IndexError if the outputs do not belong to the head. None for a
            family of objects, which has `candidates` instead.
        candidates: returns the objects of one image before thresholds and suppression, in pixels of the model's input;
            None if the family's answers are not objects.
        masks: returns the masks bool [N, H, W] of the objects that are left, in the size of the stored image; None if
            the family has no masks. Masks are made last, because few candidates are left then.
        thresholds: the default thresholds. Without "iou", nothing is suppressed.
        keypoint_names: names of the keypoints where no file states them, for heads with as many keypoints.
        preprocess: name of the preprocessing that models of this family are trained with; "" if there are several.
        rotated: whether suppression compares rotated boxes.
    """

    name: str
    task: str
    title: str
    fit: Callable[[View], Optional[Fit]]
    decode: Optional[Callable[[Outputs, Head, Frame], Answer]] = None
    candidates: Optional[Callable[[Outputs, Head, Tuple[int, int]], Objects]] = None
    masks: Optional[Callable[[Outputs, Head, Objects, Frame], Any]] = None
    thresholds: Mapping[str, float] = field(default_factory=dict)
    keypoint_names: Tuple[str, ...] = ()
    preprocess: str = ""
    rotated: bool = False


@lru_cache(maxsize=None)
def family_names() -> Tuple[str, ...]:
    """Return the names of all families, without importing them."""
    from edgeq_device.answers import families

    return tuple(sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(families.__path__)))


def load_family(name: str) -> Family:
    """Return the family `name`.

    Raises:
        BundleError: this runner has no such family.
    """
    # The name comes from a bundle, so it may only be that of a module here. A runner in a zip in a zip cannot list its
    # modules.
    module = f"edgeq_device.answers.families.{name.replace('-', '_')}"
    if not re.fullmatch("[a-z0-9-]+", name) or importlib.util.find_spec(module) is None:
        raise BundleError(
            f"this runner does not know the head {name[:60]!r}", "Use --raw, or the edgeq version that made the bundle"
        )
    family: Family = importlib.import_module(module).FAMILY
    return family


def all_families() -> Iterator[Family]:
    """Yield every family, in the order of their names."""
    return map(load_family, family_names())
