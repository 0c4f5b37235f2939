"""Decide whether MediaPipe Tasks can answer with a model, and write the .tflite file that they open.

Tasks refuse int8 inputs, and give float inputs the pixels that the file's metadata asks for. So the file has a float
image as input, and the scores or the vector that the head reads as its only output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.answers.family import load_family
from edgeq_device.answers.head import Head

from edgeq.backends.base import Artifact
from edgeq.backends.litert.convert import lower
from edgeq.backends.litert.interface import with_model_interface
from edgeq.backends.litert.layout import channels_last, model_order, moves, stored_shape
from edgeq.backends.litert.network import TfliteNetwork, TfliteOperator, TfliteTensor
from edgeq.backends.litert.rules import check
from edgeq.backends.litert.tasks_metadata import METADATA, Normalization, TaskFile, describe, with_labels
from edgeq.backends.litert.writer import write
from edgeq.data.samples import Samples
from edgeq.errors import ModelError
from edgeq.model.load import read_unchecked
from edgeq.util.records import plain

FILE = "mediapipe/model.tflite"
"""Name of the file among the files of an artifact."""
# Family of a head → the role of the output that a task reads, the task, and what the output is.
_TASKS = {
    "classify": ("scores", "ImageClassifier", "the score of each class"),
    "semantic": ("map", "ImageSegmenter", "the score of each class at each pixel"),
    "embedding": ("vector", "ImageEmbedder", "the embedding of the image"),
}
_DETECTORS = " (ObjectDetector reads the operator TFLite_Detection_PostProcess)"
# Steps that move pixels, or change how they are stored, but compute nothing with their values.
_MOVING = frozenset({"resize", "letterbox", "crop", "dtype", "layout", "expand", "channels"})
_PIXELS = Normalization((0.0,) * 3, (1.0,) * 3)
_STRETCH = {"op": "resize", "rule": "exact", "size": "model"}


def with_tasks_file(artifact: Artifact, samples: Samples, folder: Path) -> Artifact:
    """Return `artifact` with the file for MediaPipe Tasks. If Tasks cannot answer with the model, a note says why. If
    the meaning of the outputs is not known, return `artifact` itself.

    Args:
        samples: samples whose preprocessing the file's metadata states.
        folder: private folder for the file; it does not exist yet.
    """
    if artifact.head is None:
        return artifact
    try:
        network = lower(read_unchecked(artifact.model), artifact.model)
        content, notes = make_tasks_file(network, artifact.head, samples, artifact.model.stem)
    except ModelError as error:
        note = f"no file for MediaPipe Tasks: {error.text}; the bundle's runner answers"
        return replace(artifact, notes=(*artifact.notes, note))
    folder.mkdir()
    file = folder / Path(FILE).name
    file.write_bytes(content)
    return replace(artifact, files={**artifact.files, FILE: file}, notes=(*artifact.notes, *notes))


def make_tasks_file(network: TfliteNetwork, head: Head, samples: Samples, title: str) -> tuple[bytes, tuple[str, ...]]:
    """Return the bytes of the file for MediaPipe Tasks, and notes for the user.

    Raises:
        ModelError: no task reads such a head, or Tasks cannot prepare its images.
    """
    if head.family not in _TASKS:
        detects = load_family(head.family).task == "detect"
        raise ModelError(f"no task reads the head {head.family}" + _DETECTORS * detects)
    role, name, meaning = _TASKS[head.family]
    network = _with_image_input(_with_single_output(network, head.outputs.get(role, "")))
    (image,) = network.inputs
    shape = image.tensor.shape
    preprocess = getattr(samples, "preprocess", None)
    record: Mapping[str, Any] = plain(preprocess) if preprocess is not None else {}
    normalization = find_normalization(record)
    if len(set(zip(normalization.mean, normalization.std, strict=True))) > 1:
        network, normalization = _with_normalization(network, normalization), _PIXELS
    if head.parameters.get("scores") == "logits":
        network = _with_softmax(network)
    (output,) = network.outputs
    labels = _list_labels(head, samples) if role != "vector" else ()
    classes = _count_classes(output.tensor, role, name)
    if labels and len(labels) != classes:
        raise ModelError(f"there are {len(labels)} labels for {classes} classes")
    check(network)
    assert preprocess is not None
    steps = "; ".join(preprocess.arithmetic())
    task = TaskFile(
        title,
        image.name,
        (shape[2], shape[1]),
        normalization,
        f"RGB image; the proof prepared images so: {steps}",
        output.name,
        meaning,
        labels,
    )
    notes = [f"{FILE} is for {name} of MediaPipe Tasks"]
    moving = [step for step in record["steps"] if step["op"] in ("resize", "letterbox", "crop")]
    if len(moving) != 1 or not _STRETCH.items() <= moving[0].items():
        notes.append("MediaPipe Tasks stretch images to the input's size, which differs from the proof's preprocessing")
    return with_labels(write(network, metadata={METADATA: describe(task)}), labels), tuple(notes)


def find_normalization(record: Mapping[str, Any]) -> Normalization:
    """Return the normalization that a preprocessing computes, from its record.

    Raises:
        ModelError: it is not one of constants, or its channels have another order than the images that Tasks give.
    """
    if not isinstance(record.get("steps"), list | tuple):
        raise ModelError("the samples' preprocessing is not declared in steps, so its mean and deviation are not known")
    factor, offset = np.ones(3), np.zeros(3)
    for step in record["steps"]:
        name, value = step["op"], np.asarray(step.get("value", 0), np.float64)
        if name == "channels" and step["order"] != "RGB":
            raise ModelError(f"the preprocessing gives {step['order']} images, and Tasks give RGB")
        if name not in _MOVING and name not in ("add", "subtract", "multiply", "divide"):
            raise ModelError(f"Tasks have no step {name!r}")
        if value.size not in (1, 3):
            raise ModelError(f"step {name!r} has {value.size} constants for 3 channels")
        if name == "multiply":
            factor, offset = factor * value, offset * value
        elif name == "divide":
            factor, offset = factor / value, offset / value
        elif name in ("add", "subtract"):
            offset = offset + (value if name == "add" else -value)
    if not (factor > 0).all():
        raise ModelError("the preprocessing multiplies pixels by a number that is not positive")
    return Normalization(tuple(map(float, -offset / factor)), tuple(map(float, 1 / factor)))


def _with_single_output(network: TfliteNetwork, name: str) -> TfliteNetwork:
    outputs = tuple(port for port in network.outputs if port.name == name)
    if not outputs:
        raise ModelError(f"the file has no output {name!r}")
    return replace(network, outputs=outputs).without_unused()


def _with_image_input(network: TfliteNetwork) -> TfliteNetwork:
    """Return the network with a float input [1, height, width, 3] and float outputs whose channels are last.

    Raises:
        ModelError: the input is no image.
    """
    shapes = [stored_shape(p.tensor.shape, moves(p.order, model_order(len(p.order)))) for p in network.inputs]
    if len(shapes) != 1 or len(shapes[0]) != 4 or shapes[0][0] != 1 or 3 not in shapes[0][1::2]:
        raise ModelError("a task gives one RGB image [1, height, width, 3]")
    network = with_model_interface(network, channels_last if shapes[0][1] == 3 else model_order)
    if network.inputs[0].tensor.type != "float32":
        raise ModelError("the input is neither float32 nor quantized to int8")
    return network


def _with_normalization(network: TfliteNetwork, normalization: Normalization) -> TfliteNetwork:
    """Return the network with pixels from 0 to 255 as input. Tasks refuse constants that differ between channels."""
    (port,) = network.inputs
    pixels = TfliteTensor(f"{port.name}/pixels", port.tensor.shape, "float32")
    scaled = replace(pixels, name=f"{port.name}/scaled")
    operators, source = [], pixels
    factor = 1 / np.array(normalization.std)
    steps = ("MUL", factor, scaled), ("ADD", -factor * normalization.mean, port.tensor)
    for kind, values, result in steps:
        constant = TfliteTensor(f"{result.name}/{kind}", (3,), "float32", values=values.astype(np.float32))
        operators.append(TfliteOperator(kind, (source, constant), (result,), {"fusedActivationFunction": "NONE"}))
        source = result
    return replace(network, inputs=(replace(port, tensor=pixels),), operators=(*operators, *network.operators))


def _with_softmax(network: TfliteNetwork) -> TfliteNetwork:
    """Return the network with probabilities in place of logits. Tasks show scores as they are."""
    (port,) = network.outputs
    scores = TfliteTensor(f"{port.name}/probabilities", port.tensor.shape, "float32")
    operator = TfliteOperator("SOFTMAX", (port.tensor,), (scores,), {"beta": 1.0})
    return replace(network, outputs=(replace(port, tensor=scores),), operators=(*network.operators, operator))


def _count_classes(output: TfliteTensor, role: str, name: str) -> int:
    """Return the size of the last axis.

    Raises:
        ModelError: the task does not read such an output.
    """
    *others, classes = output.shape or (0,)
    fits = len(others) == 3 and others[0] == 1 if role == "map" else bool(others) and set(others) == {1}
    if not fits or classes < 2 or output.type != "float32":
        raise ModelError(f"{name} does not read an output of {output.type} {list(output.shape)}")
    return classes


def _list_labels(head: Head, samples: Samples) -> tuple[str, ...]:
    labels = tuple(str(label) for label in head.labels or getattr(samples, "score_names", ()))
    # Models of TensorFlow have a background class before the others.
    return ("background",) * (int(head.parameters.get("offset", 0)) if labels else 0) + labels
