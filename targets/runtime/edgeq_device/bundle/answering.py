"""Answer images one by one, and write a drawing of each. Only one image and its answer are in memory at a time."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.draw import SUFFIXES, sketch
from edgeq_device.answers.lines import describe
from edgeq_device.bundle.outputs import check_replaceable, save_file
from edgeq_device.errors import DataError, OutputError, UsageError
from edgeq_device.prepare.inputs import read_feeds
from edgeq_device.prepare.steps import read_image
from edgeq_device.system.files import open_file

# An input with one of these suffixes is an image; all others are arrays.
IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm")
# A larger file is not embedded in an SVG; its pixels are.
_EMBEDDED = 1 << 26


def is_image(text: str) -> bool:
    """Return whether an input is an image, by its suffix."""
    return Path(text).suffix.lower() in IMAGES


def list_inputs(texts: Sequence[str]) -> List[str]:
    """Return the inputs, with the images in each folder (not in its subfolders), sorted by name, instead of the folder.

    Raises:
        DataError: a folder contains no image, or cannot be read.
    """
    inputs: List[str] = []
    for text in texts:
        folder = Path(text)
        if not folder.is_dir():
            inputs.append(text)
            continue
        try:
            images = sorted(str(path) for path in folder.iterdir() if is_image(path.name) and path.is_file())
        except OSError as error:
            raise DataError(f"{text} cannot be read ({error.strerror})", "Check its permissions") from error
        if not images:
            raise DataError(f"{text} contains no image ({', '.join(IMAGES)})", "Name a folder of images, or files")
        inputs += images
    return inputs


def group_inputs(session: Any, inputs: Sequence[str]) -> Dict[str, Any]:
    """Return the items of a command line by name: each image, or the tensors of all files as one item.

    Raises:
        UsageError: images and tensors are mixed.
        DataError: the tensors cannot be read, or do not fit the model of the session.
    """
    images = [text for text in inputs if is_image(text)]
    if len(images) not in (0, len(inputs)):
        raise UsageError("images and tensors are mixed", "Give inputs of one kind")
    return {text: text for text in images} or {", ".join(inputs): read_feeds(session, inputs)}


def plan_drawings(
    inputs: Sequence[str], draw: Optional[Path], choose: Callable[[Path], Path], force: bool, folders: bool = False
) -> Dict[str, Path]:
    """Return the path of each input's drawing: `draw` for one input, or a .png in the folder `draw`. A path
    without a suffix is a folder.

    Args:
        choose: returns the path to write for a path that the user named, or refuses it.
        folders: whether the user gave folders of images, so that several drawings are expected.

    Raises:
        UsageError: an input is not an image, two drawings have one name, or the suffix is unknown.
        OutputError: a drawing exists, and `force` is not set.
    """
    if draw is None:
        return {}
    tensors = [text for text in inputs if not is_image(text)]
    if tensors:
        raise UsageError(f"{tensors[0]} is not an image, so nothing can be drawn over it", "Leave --draw out")
    if len(inputs) == 1 and not folders and draw.suffix and not draw.is_dir():
        if draw.suffix.lower() not in SUFFIXES:
            raise UsageError(f"a drawing cannot be a {draw.suffix} file", "Write .png or .svg")
        drawings = {inputs[0]: choose(draw)}
    else:
        if draw.suffix.lower() in SUFFIXES and not draw.is_dir():
            raise UsageError(f"{draw} is one file, but there are {len(inputs)} inputs", "Give --draw FOLDER")
        stems = Counter(Path(text).stem for text in inputs)
        names = [Path(text).stem if stems[Path(text).stem] == 1 else Path(text).name for text in inputs]
        (twice, count), *_ = Counter(names).most_common(1)
        if count > 1:
            raise UsageError(f"{count} inputs are called {twice}", "Draw the folders one by one")
        drawings = {text: choose(draw / f"{name}.png") for text, name in zip(inputs, names)}
        try:
            draw.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"{draw} is not a folder ({error.strerror})", "Choose another folder") from error
    images = {os.path.realpath(text) for text in inputs}
    for path in drawings.values():
        if os.path.realpath(path) in images:
            raise OutputError(f"{path} is an input, which is never replaced", "Draw to another file")
        check_replaceable(path, force=force)
    return drawings


@dataclass(frozen=True)
class ItemAnswer:
    """Hold what is printed about one input.

    Attributes:
        lines: the lines for people, without the heading.
        record: the JSON object: "input", and the answer or "error".
        problem: why the input has no answer; "" if it has one.
    """

    lines: Tuple[str, ...]
    record: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    def list_lines(self, heading: bool) -> List[str]:
        """Return the lines to print. If there are several inputs, they stand under the input's name."""
        return [str(self.record["input"]), *(f"  {line}" for line in self.lines)] if heading else list(self.lines)


def answer_each(
    model: Any,
    items: Mapping[str, Any],
    threshold: Optional[float],
    drawings: Mapping[str, Path],
    force: bool = False,
) -> Iterator[ItemAnswer]:
    """Yield the answer to each item, and write its drawing. If there are several items, an unreadable one gets an
    error instead.

    Args:
        items: name of the input → what `model.answer` takes.
        threshold: see `Predictor.answer`.
        drawings: input → path of its drawing.

    Raises:
        DataError: the only item is unreadable, or does not fit the model.
        OutputError: a drawing cannot be written.
    """
    for name, item in items.items():
        try:
            result = model.answer(item, threshold)
        except DataError as error:
            if len(items) == 1:
                raise
            record = {"input": name, "error": {"problem": error.problem, "fix": error.fix}}
            yield ItemAnswer((f"error: {error}",), record, error.problem)
            continue
        record = {"input": name, **result.to_json()}
        if name in drawings:
            save_file(drawings[name], _make_drawing(result, name, drawings[name].suffix.lower()), force=force)
            record["drawing"] = str(drawings[name])
        yield ItemAnswer(tuple(describe(result)), record)


def check_complete(problems: Sequence[str], count: int) -> None:
    """Raise an error if some of `count` inputs have no answer.

    Raises:
        DataError: it names the inputs by their problems.
    """
    if problems:
        further = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise DataError(f"{len(problems)} of {count} inputs have no answer: {'; '.join(problems[:3])}{further}")


def _make_drawing(answer: Answer, image: str, suffix: str) -> Callable[[Path], object]:
    # Import the renderer that is needed: the SVG needs no Pillow.
    if suffix == ".svg":
        from edgeq_device.answers.draw_svg import draw_svg

        with open_file(Path(image)) as stream:
            content = stream.read(_EMBEDDED + 1)
        drawing = draw_svg(
            sketch(answer), content if len(content) <= _EMBEDDED else b"", lambda: read_image(Path(image))
        )
    else:
        from edgeq_device.answers.draw_pillow import draw_png

        drawing = draw_png(sketch(answer), read_image(Path(image)))
    return lambda path: path.write_bytes(drawing)
