"""What every use of onnxruntime's quantizer needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgeq.model.load import model_files
from edgeq.scheme import IntegerType

# Protobuf refuses messages from 2 GiB on; the quantized file is smaller, but the intermediate ones may not be.
_EXTERNAL_DATA_FROM = 2**31 - 2**20


def quant_type(name: IntegerType) -> Any:
    """onnxruntime's name of an integer type."""
    from onnxruntime.quantization import QuantType

    return {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8}[name]


def needs_external_data(model: Path) -> bool:
    """Whether a model is too large to be one file."""
    return sum(file.stat().st_size for file in model_files(model)) >= _EXTERNAL_DATA_FROM


def one_line(error: Exception) -> str:
    """An exception's text for a message."""
    return " ".join(str(error).split())


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps onnxruntime's tools, which log the story of every node on the root logger, to themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
