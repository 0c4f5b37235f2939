"""Recognise voices of Piper by MODEL.onnx.json. Speech from text is no answer that edgeq decodes, so this is a note."""

from __future__ import annotations

from edgeq.describe.beside import find_json, is_number
from edgeq.describe.facts import Exported, ModelFacts, Reader


def read(exported: Exported) -> ModelFacts:
    """Return a note on the voice."""
    path = exported.path.with_name(f"{exported.path.name}.json")
    table = find_json(path, '"phoneme_id_map"')
    sound = table.get("audio") if table is not None else None
    rate = sound.get("sample_rate") if isinstance(sound, dict) else None
    if not is_number(rate):
        return ModelFacts()
    return ModelFacts(notes=(f"a voice of Piper that speaks at {rate:g} Hz, as {path} says; edgeq keeps its outputs",))


READER = Reader("piper", "MODEL.onnx.json of Piper's voices", read)
