"""Draw what float32 and int8 answer for the images whose answers differ most, for a report."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.answers.draw import sketch
from edgeq_device.answers.draw_pillow import draw_png
from edgeq_device.answers.head import Head
from edgeq_device.prepare.steps import read_image
from PIL import Image

from edgeq.data.sample import Sample
from edgeq.data.samples import Samples, SourceSamples, spread_over
from edgeq.errors import DataError
from edgeq.measure.answer_meter import AnswerTallies, find_threshold, lower_threshold
from edgeq.measure.answer_task import FloatAnswers, decode_sample, judges_answers
from edgeq.measure.inference import Outputs, Session, run_samples
from edgeq.reporting.read import PicturePair
from edgeq.util.display import SILENT, Progress

_SAMPLES, _SHOWN = 32, 3
# A picture takes about 30 kB, which a report can hold without being slow to open.
_SIDE, _QUALITY = 380, 74


def draw_pictures(
    head: Head | None, samples: Samples, sessions: tuple[Session, Session], progress: Progress = SILENT
) -> list[PicturePair]:
    """Return the images whose answers differ most between the float model and the int8 model, the worst first. Return
    nothing if the answers do not decide, or if the samples are not image files.

    Args:
        sessions: sessions of the float model and of the int8 model.
    """
    if head is None or not judges_answers(head):
        return []
    task, lowered = FloatAnswers(head), lower_threshold(head)
    compared: list[tuple[float, Sample, tuple[Outputs, Outputs]]] = []
    names = dict(zip(("float32", "int8"), sessions, strict=True))
    for sample, outputs in run_samples(names, spread_over(samples, _SAMPLES), progress=progress):
        if "scale" not in sample.context:
            return []
        pair = outputs["float32"], outputs["int8"]
        answers = [decode_sample(lowered, each, sample) for each in pair]
        tally = task.figure.compare(answers[0], answers[1], find_threshold(head))
        compared.append((float(AnswerTallies([tally]).sample_figures()[0]), sample, pair))
        # Only the worst are needed, and outputs are large.
        compared = sorted(compared, key=lambda entry: entry[0])[:_SHOWN]
    return [
        PicturePair(str(sample.context["path"]), figure, *(_draw(head, outputs, sample, image) for outputs in pair))
        for figure, sample, pair in compared
        for image in _find_image(samples, sample)
    ]


def _draw(head: Head, outputs: Outputs, sample: Sample, image: Path) -> str:
    drawing = draw_png(sketch(decode_sample(head, outputs, sample)), read_image(image))
    with Image.open(io.BytesIO(drawing), formats=("PNG",)) as picture:
        picture.thumbnail((_SIDE, _SIDE))
        content = io.BytesIO()
        picture.convert("RGB").save(content, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode('ascii')}"


def _find_image(samples: Samples, sample: Sample) -> Iterator[Path]:
    """Yield the file of a sample, if it is an image in the folder of the data that can still be read."""
    source: Any = samples
    while not isinstance(source, SourceSamples):
        source = getattr(source, "samples", None)
        if source is None:
            return
    folder = source.opened_source.folder
    path = folder / str(sample.context.get("path", "")) if folder is not None else None
    if path is None or not path.is_file():
        return
    try:
        size = np.shape(read_image(path))[1::-1]
    except DataError:  # The data are images inside another file.
        return
    if tuple(size) == tuple(sample.context["original_size"]):
        yield path
