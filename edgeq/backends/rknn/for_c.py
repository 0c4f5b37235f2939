"""Write two files with which a C program can check a compiled file on its chip.

    tensors.json    {"edgeq_tensors": 1, "inputs": [...], "outputs": [...], "cases": [...]}
    selftest.bin    16 bytes "edgeq-selftest", then the arrays as they are in memory: C order, little-endian

Each tensor has a name, a dtype and a shape. For every input and output, in order, a case lists the byte offset of its
array. The runtime's C interface uses floats if `rknn_input.type` and `want_float` request them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeq.data.samples import Sample
from edgeq.signature import Signature, TensorSpec

MAGIC = b"edgeq-selftest\0\0"
FORMS = b'{"edgeq_tensors": 1'


def write_for_c(
    signature: Signature,
    samples: Sequence[Sample],
    answers: Sequence[Mapping[str, NDArray[np.generic]]],
    stem: str,
    folder: Path,
) -> dict[str, Path]:
    """Write both files into `folder`. Return their paths, keyed by their names in a bundle, which begin with `stem`."""
    # A C program can map the file and use the offsets as they are, without a parser.
    content, cases = bytearray(MAGIC), []
    for sample, answer in zip(samples, answers, strict=True):
        case: dict[str, list[int]] = {}
        for kind, specs, arrays in (
            ("inputs", signature.inputs, sample.inputs),
            ("outputs", signature.outputs, answer),
        ):
            case[kind] = []
            for spec in specs:
                case[kind].append(len(content))
                content += np.asarray(arrays[spec.name], spec.dtype.newbyteorder("<")).tobytes()
        cases.append(case)
    forms = {
        "edgeq_tensors": 1,
        "inputs": [_form(spec) for spec in signature.inputs],
        "outputs": [_form(spec) for spec in signature.outputs],
        "cases": cases,
    }
    # The names begin with the model's, because several models may be in one folder on the board.
    files = {f"{stem}.tensors.json": folder / "tensors.json", f"{stem}.selftest.bin": folder / "selftest.bin"}
    (folder / "tensors.json").write_text(json.dumps(forms) + "\n", encoding="utf-8")
    (folder / "selftest.bin").write_bytes(content)
    return files


def _form(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "dtype": str(spec.dtype), "shape": list(spec.shape or ())}
