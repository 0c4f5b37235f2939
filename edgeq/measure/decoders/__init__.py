"""Detector heads: from a model's raw outputs to candidate boxes. One head a file; by name, or a user's own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from edgeq.errors import UsageError
from edgeq.measure.boxes import Detections
from edgeq.measure.inference import Outputs
from edgeq.measure.plugin import is_plugin, load_plugin


class Decoder(Protocol):
    def __call__(self, outputs: Outputs, size: tuple[int, int]) -> Detections:
        """Candidates of one image, boxes in pixels of the model's input of `size` (width, height), not yet suppressed.

        Raises:
            UsageError: the outputs are not of this head.
        """


DECODERS: Mapping[str, str] = MappingProxyType(
    {
        "yolox": "edgeq.measure.decoders.yolox:decode",
        "yolov3": "edgeq.measure.decoders.yolov3:decode",
        "yolov5": "edgeq.measure.decoders.yolov5:decode",
        "yolov8": "edgeq.measure.decoders.yolov8:decode",
        "ssd": "edgeq.measure.decoders.ssd:decode",
    }
)


def load_decoder(name: str) -> Decoder:
    """The decoder of that name, or a user's "path.py:function".

    Raises:
        UsageError: unknown name, or a function that cannot be loaded.
    """
    if is_plugin(name):
        return load_plugin(name, "decoder")
    if name not in DECODERS:
        raise UsageError(f"unknown decoder {name!r}", f"Known: {', '.join(DECODERS)}, or path.py:function")
    module, _, attribute = DECODERS[name].partition(":")
    decoder: Decoder = getattr(importlib.import_module(module), attribute)
    return decoder
