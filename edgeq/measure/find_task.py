"""Choose what to measure if no task is named. A COCO file next to the images means detection. Otherwise the task can be
classification.

Classification requires that the labels are class numbers, and that the model's scores predict them better than a guess.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgeq.data.array_store import ArrayStore
from edgeq.data.axes import model_size
from edgeq.data.classes import count_scores
from edgeq.data.open_source import Data, find_files
from edgeq.data.sample import Sample
from edgeq.data.samples import Samples, spread_places
from edgeq.errors import DataError, EdgeqError, RuntimeUnavailableError
from edgeq.measure.coco import load_annotations, load_package
from edgeq.measure.decoders import Decoder, recognise
from edgeq.measure.inference import Session, infer, infer_once
from edgeq.measure.rows import split_rows
from edgeq.measure.task import Task, TaskOptions, make_task
from edgeq.measure.tasks.classification import infer_task
from edgeq.signature import Signature
from edgeq.util.display import SILENT, Progress

ANNOTATED = frozenset({"detection", "instance-segmentation", "keypoints", "oriented-detection"})
"""Tasks that need annotations, which are searched next to the images."""
# So many rows show whether scores predict the labels better than a guess.
_FEW = 64
# A folder may contain any JSON files. These limits bound the time for reading them.
_MOST_FILES = 16
_LARGEST = 64 << 20


def infer_task_name(name: str | None, options: TaskOptions) -> str | None:
    """Return the name of the task. If annotations but no name are given, the task is detection."""
    return "detection" if name is None and options.annotations is not None else name


def find_annotations(source: Any) -> Path | None:
    """Return the COCO file that lists the first image of `source`, or the folder with its labels in YOLO's or VOC's
    form. Return None if there is none.

    edgeq searches the folder of the images, the folder above, and a folder called annotations in either of them. A
    folder of labels stands in the place of "images" (JPEGImages) in the path.
    """
    if not isinstance(source, str | Path):
        return None
    try:
        files = find_files(source)
    except EdgeqError:  # The code that opens the data reports this error.
        return None
    if files.kind != "images":
        return None
    folders = (files.root, files.root.parent, files.root / "annotations", files.root.parent / "annotations")
    listed = [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.json"))]
    listed = [path for path in listed if path.stat().st_size <= _LARGEST][:_MOST_FILES]
    for path in [*listed, *_find_label_folders(files.root)]:
        try:
            load_annotations(path).image(files.files[0].relative_to(files.root).as_posix())
        except DataError:  # The file is another kind of JSON, or a COCO file for other images.
            continue
        return path
    return None


def _find_label_folders(root: Path) -> list[Path]:
    """Return the folders that belong to a folder of images as YOLO and VOC arrange them, if they exist."""
    places = []
    for images, labels in (("images", "labels"), ("JPEGImages", "Annotations")):
        if images in root.parts:
            place = len(root.parts) - 1 - root.parts[::-1].index(images)
            places.append(Path(*root.parts[:place], labels, *root.parts[place + 1 :]))
        # The data may also be the folder above both.
        if (root / images).is_dir():
            places.append(root / labels)
    return [place for place in places if place.is_dir()]


def find_detection(data: Data, signature: Signature, session: Session, progress: Progress = SILENT) -> Task | None:
    """Return a detection task if the model is a detector and its images have a COCO file next to them. Otherwise return
    None.
    """
    path = find_annotations(data.source) if count_scores(signature) is None else None
    if path is None or not find_heads(signature, session):
        return None
    try:
        load_package()
    except RuntimeUnavailableError as error:
        progress.note(f"{path} lists the images, but mAP cannot be measured: {error.text}")
        return None
    progress.note(f"found: task detection, by {path}; ⟨task⟩ sets another")
    return make_task("detection", TaskOptions(annotations=path))


def find_heads(signature: Signature, session: Session) -> list[Decoder]:
    """Return the decoders that can read the model's outputs for a black image. Return [] if the model is not a
    detector.
    """
    if count_scores(signature) is not None or len(signature.inputs) != 1:
        return []
    spec = signature.inputs[0]
    if (size := model_size(spec)) is None:
        return []
    shape = tuple(side if isinstance(side, int) else 1 for side in spec.shape or ())
    try:
        outputs = infer(session, Sample("a black image", {spec.name: np.zeros(shape, spec.dtype)}))
    except EdgeqError:  # The model's input is not one image.
        return []
    return recognise(outputs, size)


def find_classification(
    samples: Samples, session: Session, progress: Progress = SILENT, *, known_outputs: ArrayStore | None = None
) -> Task | None:
    """Return the classification task if the model's scores predict the samples' class numbers better than a guess.
    Otherwise return None.

    Args:
        known_outputs: the session's outputs by the sample's place. What is missing is computed and added.
    """
    task = infer_task(first_sample := next(iter(samples)), infer_once(session, first_sample, known_outputs, 0))
    if task is None:
        return None
    pairs = [
        (row, row_outputs[""])
        for place, sample in spread_places(samples, _FEW)
        for row, row_outputs in split_rows(sample, {"": infer_once(session, sample, known_outputs, place)})
    ]
    try:
        settled, _ = task.settled(iter(pairs))
        meter = settled.start()
        for row, outputs in pairs:
            meter.update(outputs, row)
    except DataError:  # The labels are for another task.
        return None
    if doubtful := meter.notes():
        progress.note(f"the labels are not used: {doubtful[0]}")
        return None
    progress.note("found: task classification, by the labels; ⟨task⟩ sets another")
    return task
