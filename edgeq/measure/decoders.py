"""Decode the outputs of detector heads to candidate boxes: by a family of edgeq_device, a plug-in or a user's function.

Each family of the task "detect" (`edgeq_device.answers.families`) is a decoder. Plug-ins add heads through an entry
point of the group `edgeq.decoders`. "path.py:function" names a function in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from edgeq_device.answers.decode import NOT_OF_THE_HEAD
from edgeq_device.answers.family import Family, View, load_family
from edgeq_device.answers.head import Head

from edgeq.errors import UsageError
from edgeq.measure.boxes import Detections
from edgeq.measure.inference import Outputs
from edgeq.util.registry import DECODERS, Registry
from edgeq.util.user_code import load_function, names_function


class Decode(Protocol):
    """Define the signature of a decoder function."""

    def __call__(self, outputs: Outputs, size: tuple[int, int]) -> Detections:
        """Return the candidates of one image, before suppression.

        Boxes are in pixels of the model's input, whose `size` is (width, height). If a model gives shares of the size
        where its head usually gives pixels, or the other way round, `edgeq.measure.boxes.in_pixels` converts
        them.

        Raises:
            UsageError: the outputs do not belong to this head.
        """


@dataclass(frozen=True)
class FamilyDecode:
    """Decode by a family of heads.

    Attributes:
        family: the family.
        head: the head of one model. Without it, the shapes and values of each image's outputs decide the parameters.
    """

    family: Family
    head: Head | None = None

    @classmethod
    def of(cls, head: Head) -> FamilyDecode | None:
        """Return the decoder of a head whose answers are upright boxes, or None."""
        family = load_family(head.family)
        return cls(family, head) if family.candidates is not None and family.task == "detect" else None

    @property
    def suppressed(self) -> bool:
        """Return whether overlapping boxes must still be suppressed."""
        return "iou" in self.family.thresholds

    @property
    def in_image(self) -> bool:
        """Return whether boxes are in pixels of the stored image, not of the model's input."""
        return self.head is not None and self.head.parameters.get("frame") == "image"

    def settled(
        self, outputs: Outputs, size: tuple[int, int], inputs: tuple[str, ...] = (), *, forced: bool = True
    ) -> FamilyDecode | None:
        """Return the decoder for the model with these outputs, or None if they do not fit.

        Args:
            inputs: names of the model's inputs, which show whether it gets the size of the stored image.
            forced: whether the user has named the family. The shapes of the outputs suffice then.
        """
        if self.head is not None:
            return self
        fit = self.family.fit(View(outputs, size, inputs=dict.fromkeys(inputs), forced=forced))
        if fit is None:
            return None
        return replace(self, head=Head(self.family.name, dict(fit.outputs), dict(fit.parameters)))

    def __call__(self, outputs: Outputs, size: tuple[int, int]) -> Detections:
        """Return the candidates of one image in pixels; see `Decode`."""
        assert self.family.candidates is not None, "only families of objects are decoders"
        bound = self.settled(outputs, size)
        problem = ""
        if bound is not None and bound.head is not None:
            try:
                with np.errstate(invalid="ignore", over="ignore"):
                    return self.family.candidates(outputs, bound.head, size)
            except NOT_OF_THE_HEAD as error:
                problem = f" ({error})"
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
        raise UsageError(
            f"decoder {self.family.name} takes {self.family.title}, but the model gives {shapes}{problem}",
            "Choose another ⟨decoder⟩, or give your own as path.py:function",
        )


@dataclass(frozen=True)
class Decoder:
    """Describe one detector head.

    Attributes:
        name: name for `decoder`.
        title: description of the outputs that the decoder reads, with their shapes.
        decode: the decoder function.
        fits: function that returns whether the outputs for an image belong to this head. The image has the model's
            input size (width, height). The function uses the outputs' shapes and the bounds of their values. None if
            the head cannot be recognised.
        preprocess: name of the preprocessing that models with this head are trained with; "" if there are several.
    """

    name: str
    title: str
    decode: Decode
    fits: Callable[[Outputs, tuple[int, int]], bool] | None = None
    preprocess: str = ""


def _to_decoder(extension: Any) -> Any:
    """Return a family as a decoder. Plug-ins register either of them."""
    if not isinstance(extension, Family):
        return extension
    return Decoder(extension.name, extension.title, FamilyDecode(extension), preprocess=extension.preprocess)


REGISTRY: Registry[Decoder] = Registry(
    DECODERS, lambda entry: isinstance(entry, Decoder), "edgeq.measure.decoders.Decoder", _to_decoder
)


def recognise(outputs: Outputs, size: tuple[int, int], inputs: tuple[str, ...] = ()) -> list[Decoder]:
    """Return the decoders that fit the outputs for one image of the model's input size. Those of families are settled
    on these outputs. `inputs` has the names of the model's inputs.
    """
    decoders = []
    for _, decoder in REGISTRY.items():
        if isinstance(decoder.decode, FamilyDecode):
            settled = decoder.decode.settled(outputs, size, inputs, forced=False)
            decoders += [replace(decoder, decode=settled)] if settled is not None else []
        elif decoder.fits is not None and decoder.fits(outputs, size):
            decoders.append(decoder)
    return decoders


def load_decoder(name: str) -> Decode:
    """Return the function of a registered decoder, or a user's "path.py:function".

    Raises:
        UsageError: the name is unknown, or the function cannot be loaded.
    """
    return load_function(name, "decoder", UsageError) if names_function(name) else REGISTRY.load(name).decode
