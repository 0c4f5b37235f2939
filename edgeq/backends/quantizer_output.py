"""Where onnxruntime's quantizer writes a model whose weights go into a file beside it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from edgeq.model.tensors import is_external, iter_tensors


@contextmanager
def quantizer_output(destination: Path, *, external: bool) -> Iterator[Path]:
    """A path for the quantizer to write; afterwards the model is at `destination`, its weights in `<name>.data` beside.

    onnx refuses to name a data file as one in the *current* folder is called, wherever the model is written, and a
    model to be quantized often lies there with its own. So it is written under a random name.

    Args:
        external: whether weights are to be in a file of their own; without it the path is `destination`.
    """
    if not external:
        yield destination
        return
    draft = destination.with_name(f"{secrets.token_hex(16)}.onnx")
    written, data = Path(f"{draft}.data"), Path(f"{destination}.data")
    yield draft
    model = onnx.load(draft, load_external_data=False)
    for tensor in iter_tensors(model):
        if is_external(tensor):
            place = next(entry for entry in tensor.external_data if entry.key == "location")
            place.value = data.name
    destination.write_bytes(model.SerializeToString(deterministic=True))
    draft.unlink()
    if written.exists():
        os.replace(written, data)
