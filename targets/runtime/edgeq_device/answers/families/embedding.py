"""Embeddings: a vector whose direction says what the input is like (ArcFace, SFace, OSNet, CLIP).

    vector [1, D] or [1, D, 1, 1]

The answer's vector has length 1, so the dot product of two answers is their cosine similarity.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.checks import find_rows, read_row
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head

_NAMES = ("image_embeds", "text_embeds", "embedding", "embeddings", "sentence_embedding")
_SHORTEST = 32


def decode(outputs: Outputs, head: Head, frame: Any) -> Answer:
    """Return the vector divided by its length. A vector of zeros stays as it is."""
    del frame
    vector = read_row(outputs[head.outputs["vector"]])
    length = float(np.sqrt((vector**2).sum()))
    return Answer("embedding", vector=vector / length if length > 0 else vector)


def fit(view: View) -> Optional[Fit]:
    """Accept a row with the name of an embedding, or the only output if its length is 1 and it has negative values. If
    the family is named, accept the only row.
    """
    rows = find_rows(view.outputs)
    names = [name for name in rows if name in _NAMES]
    if not names and len(rows) == 1 and (view.named or view.classes is None):
        ((name, row),) = rows.items()
        unit = len(row) >= _SHORTEST and row.min() < 0 and abs((row**2).sum() - 1) < 1e-3
        names = [name] if view.named or (unit and len(view.outputs) == 1) else []
    return Fit({"vector": names[0]}) if names else None


FAMILY = Family("embedding", "embedding", "vector [1, D]", fit, decode=decode)
