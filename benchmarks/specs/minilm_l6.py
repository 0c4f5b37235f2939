"""Preprocess text for all-MiniLM-L6-v2 by turning the two sentences of each table row into token ids. This is an
example of a preprocessing function for text.

The environment variable EDGEQ_TOKENIZER contains the path of tokenizer.json. The package `tokenizers` must be
installed.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.data.preprocess import register

LENGTH = 128


@functools.cache
def tokenizer() -> Any:
    """Return the tokenizer from the file that EDGEQ_TOKENIZER names."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(os.environ["EDGEQ_TOKENIZER"])
    loaded.enable_truncation(LENGTH)
    loaded.enable_padding()
    return loaded


@register("minilm", title="WordPiece ids of the two sentences of a row", reads="text", source={"label": "2"})
def tokens(row: list[str]) -> dict[str, NDArray[np.int64]]:
    """Return three int64 inputs of shape [2, length of the longer sentence] for a row [sentence, sentence, score]."""
    encoded = tokenizer().encode_batch(row[:2])
    return {
        "input_ids": np.array([e.ids for e in encoded], np.int64),
        "attention_mask": np.array([e.attention_mask for e in encoded], np.int64),
        "token_type_ids": np.array([e.type_ids for e in encoded], np.int64),
    }
