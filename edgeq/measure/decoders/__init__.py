"""Detector heads: from a model's raw outputs to candidate boxes. One head a file, with its object `DECODER`.

Plug-ins add theirs by an entry point of the group `edgeq.decoders`; "path.py:function" names a function in a file.
"""

from __future__ import annotations

from edgeq.errors import UsageError
from edgeq.measure.decoders._base import Decode, Decoder
from edgeq.util.registry import DECODERS, Registry, load_function, names_function

__all__ = ["REGISTRY", "Decode", "Decoder", "load_decoder"]

REGISTRY: Registry[Decoder] = Registry(
    DECODERS, lambda found: isinstance(found, Decoder), "edgeq.measure.decoders.Decoder"
)


def load_decoder(name: str) -> Decode:
    """The function of a registered decoder, or a user's "path.py:function".

    Raises:
        UsageError: unknown name, or a function that cannot be loaded.
    """
    return load_function(name, "decoder", UsageError) if names_function(name) else REGISTRY.load(name).decode
