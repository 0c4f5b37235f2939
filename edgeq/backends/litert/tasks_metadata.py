"""Write the metadata of a .tflite file that MediaPipe Tasks read: how to prepare an image, and what the output means.

The metadata is a flatbuffer of its own inside the file. The files of labels that it names are appended to the .tflite
file as an uncompressed zip. Source: metadata_schema.fbs, which the wheel of mediapipe 1.2.3 contains.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

METADATA = "TFLITE_METADATA"
"""Name of the entry of a model's metadata that contains the bytes of `describe`."""
LABELS = "labels.txt"
# What each number stands for in the schema.
_IDENTIFIER, _PARSER = b"M001", "1.0.0"
_FEATURE, _IMAGE, _RGB, _NORMALIZATION, _AXIS_LABELS = (np.uint8(n) for n in (1, 2, 1, 1, 2))
# A zip stores times, and the same model must always give the same bytes.
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Normalization:
    """Hold the formula (x - mean) / std for each of R, G and B. x is the value of a pixel from 0 to 255."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class TaskFile:
    """Say what the metadata of a file states.

    Attributes:
        title: name of the model.
        input_name: name of the image input.
        size: (width, height) of the image input.
        preparation: how the proof prepared images, in words.
        output_name: name of the output.
        meaning: what the output is, in words.
        labels: name of each index of the output's last axis; may be empty.
    """

    title: str
    input_name: str
    size: tuple[int, int]
    normalization: Normalization
    preparation: str
    output_name: str
    meaning: str
    labels: tuple[str, ...] = ()


def describe(task: TaskFile) -> bytes:
    """Return the flatbuffer of the metadata. The same values always give the same bytes."""
    import flatbuffers

    ends = np.array([[255.0], [0.0]])
    high, low = (ends - task.normalization.mean) / task.normalization.std
    size = {0: np.uint32(task.size[0]), 1: np.uint32(task.size[1])}
    options = {0: _floats(task.normalization.mean), 1: _floats(task.normalization.std)}
    image = {
        0: task.input_name,
        1: task.preparation,
        3: {0: _IMAGE, 1: {0: _RGB, 1: size}},
        4: [{0: _NORMALIZATION, 1: options}],
        5: {0: _floats(high), 1: _floats(low)},
    }
    files = [{0: LABELS, 1: "the name of each index, one a line", 2: _AXIS_LABELS}] if task.labels else []
    result = {0: task.output_name, 1: task.meaning, 3: {0: _FEATURE, 1: {}}, 6: files}
    model = {0: task.title, 3: [{2: [image], 3: [result]}], 7: _PARSER}
    builder = flatbuffers.Builder(1024)
    builder.Finish(_add_table(builder, model), _IDENTIFIER)
    return bytes(builder.Output())


def with_labels(content: bytes, labels: Sequence[str]) -> bytes:
    """Return a .tflite file with the labels appended, one a line. Without labels, return the file itself."""
    if not labels:
        return content
    file = io.BytesIO(content)
    # In this mode, zipfile keeps the bytes in front of the zip, and counts positions from the beginning of the file.
    with zipfile.ZipFile(file, "a", zipfile.ZIP_STORED) as archive:
        # A label with a line break would shift all that follow.
        lines = "".join(f"{' '.join(label.split())}\n" for label in labels)
        archive.writestr(zipfile.ZipInfo(LABELS, _EPOCH), lines.encode("utf-8", "replace"))
    return file.getvalue()


def _floats(values: Any) -> Any:
    return np.asarray(values, np.float32)


def _add_table(builder: Any, fields: Mapping[int, Any]) -> Any:
    """Write a table whose fields are given by their numbers in the schema, and return its position.

    A field is a number of the schema's type, or else a reference: a text, a table, a list of tables or an array.
    """
    places = {n: _add_reference(builder, value) for n, value in fields.items() if not isinstance(value, np.integer)}
    builder.StartObject(max(fields, default=-1) + 1)
    for number, value in fields.items():
        if number in places:
            builder.PrependUOffsetTRelativeSlot(number, places[number], 0)
        elif value.dtype == np.uint32:
            builder.PrependUint32Slot(number, int(value), 0)
        else:
            builder.PrependUint8Slot(number, int(value), 0)
    return builder.EndObject()


def _add_reference(builder: Any, value: Any) -> Any:
    if isinstance(value, str):
        return builder.CreateString(value)
    if isinstance(value, np.ndarray):
        return builder.CreateNumpyVector(value)
    if isinstance(value, Mapping):
        return _add_table(builder, value)
    tables = [_add_table(builder, table) for table in value]
    builder.StartVector(4, len(tables), 4)
    # A flatbuffer is written from its end.
    for place in reversed(tables):
        builder.PrependUOffsetTRelative(place)
    return builder.EndVector()
