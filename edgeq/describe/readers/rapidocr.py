"""Read the dictionary that RapidOCR writes into PP-OCR's recognition models: one character a line, under "character".

A dictionary of another model gives fluent nonsense without an error, so its number of characters must fit the outputs:
columns = characters + 1 (the blank, first), or + 2 (a space too, last).
"""

from __future__ import annotations

from edgeq.data.preprocess import shipped
from edgeq.describe.beside import check_names
from edgeq.describe.facts import Exported, Fact, ModelFacts, Reader

_PREPROCESS = "ppocr-rec"


def read(exported: Exported) -> ModelFacts:
    """Return the characters, and that the blank is the first column."""
    text = exported.metadata.get("character")
    # One character is no dictionary.
    if not text or "\n" not in text:
        return ModelFacts()
    source = "character in the model's metadata"
    # `splitlines` would also split at characters such as U+2028, and `strip` would lose a line that is a space.
    lines = text.removesuffix("\n").split("\n")
    return ModelFacts(
        task=Fact("text", source),
        labels=Fact(check_names(lines, f"'{source}'"), source),
        preprocess=Fact(_PREPROCESS, source, assumed=True) if _PREPROCESS in shipped() else None,
        hints=Fact({"blank": 0}, source),
    )


READER = Reader("rapidocr", "RapidOCR's dictionary in the ONNX file", read)
