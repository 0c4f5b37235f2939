"""Read the symbols of speech and text recognition: tokens.txt next to the model ("symbol id" a line), and sherpa-onnx'
metadata (model_type, vocab_size).
"""

from __future__ import annotations

import re

from edgeq.describe.beside import check_names, find_text
from edgeq.describe.facts import Exported, Fact, ModelFacts, Reader
from edgeq.errors import DataError

_BLANKS = ("<blk>", "<blank>", "<BLK>", "<BLANK>")
# The symbol itself may be a space or contain one.
_LINE = re.compile(r"(.*?)[ \t]+(\d{1,7})")
_METADATA = ("subsampling_factor", "vocab_size", "sample_rate", "model_author", "lfr_window_size")


def read(exported: Exported) -> ModelFacts:
    """Return the symbols without the blank, and the blank's number."""
    metadata = exported.metadata
    kind = metadata.get("model_type", "")
    sherpa = bool(kind) and any(key in metadata for key in _METADATA)
    source = f"model_type {kind[:60]!r} in the model's metadata"
    task = Fact("text", source) if sherpa and "ctc" in kind.lower() else None
    notes = []
    if sherpa and metadata.get("sample_rate", "").isdigit():
        notes.append(f"the model takes sound of {metadata['sample_rate'][:9]} Hz, as sample_rate in its metadata says")
    path = exported.path.parent / "tokens.txt"
    text = find_text(path, [])
    lines = text.removesuffix("\n").replace("\r\n", "\n").split("\n") if text else []
    matches = [_LINE.fullmatch(line) for line in lines]
    # Without numbers, the lines themselves are the symbols.
    if len(lines) > 1 and not any(matches):
        matches = [_LINE.fullmatch(f"{line} {number}") for number, line in enumerate(lines)]
    if not lines or not all(matches):
        return ModelFacts(task=task, notes=tuple(notes))
    # A line "  3" is the symbol " ".
    symbols = {int(match[2]): match[1] or " " for match in matches if match}
    if sorted(symbols) != list(range(len(lines))):
        raise DataError(f"{path} does not number its symbols from 0", "Correct the file, or move it away")
    size = metadata.get("vocab_size", "")
    if sherpa and size.isdigit() and int(size[:9]) != len(lines):
        problem = DataError(
            f"{path} has {len(lines)} symbols, but vocab_size in the model's metadata is {size[:9]}",
            "Use the model's own tokens.txt, or give ⟨classes⟩",
        )
    else:
        problem = None
    blank = next((number for number, symbol in symbols.items() if symbol in _BLANKS), None)
    names = [symbols[number] for number in range(len(lines)) if number != blank]
    return ModelFacts(
        task=task,
        labels=Fact(check_names(names, str(path)), str(path), problem=problem),
        hints=Fact({"blank": blank}, str(path)) if blank is not None else None,
        notes=tuple(notes),
    )


READER = Reader("tokens", "tokens.txt next to the model, and sherpa-onnx' metadata", read)
