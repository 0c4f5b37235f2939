"""Read the file for MediaPipe Tasks back, and run it: its metadata, labels, input and output."""

from __future__ import annotations

import io
import struct
import zipfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from edgeq_device.answers.head import Head
from hypothesis import given
from hypothesis import strategies as st

from edgeq.backends.litert.network import TfliteNetwork
from edgeq.backends.litert.tasks import find_normalization, make_tasks_file
from edgeq.backends.litert.tasks_metadata import METADATA
from edgeq.backends.litert.writer import schema
from edgeq.data.images import Picture
from edgeq.data.preprocess import load_preprocess, shipped
from edgeq.errors import ModelError
from edgeq.signature import TensorSpec
from edgeq.util.records import plain
from tests.backends.litert.files import XNNPACK, answers, litert, network_of, quantized

pytest.importorskip("flatbuffers")
CLASSES = ("red", "green", "blue")


class Table:
    """Read a table of a flatbuffer by the numbers of its fields. Independent of the writer."""

    def __init__(self, content: bytes, place: int | None = None) -> None:
        self.content = content
        self.place = struct.unpack_from("<I", content, 0)[0] if place is None else place

    def field(self, number: int) -> int:
        """Return the position of a field, or 0 if the table does not have it."""
        table = self.place - struct.unpack_from("<i", self.content, self.place)[0]
        size = struct.unpack_from("<H", self.content, table)[0]
        offset = struct.unpack_from("<H", self.content, table + 4 + 2 * number)[0] if 4 + 2 * number < size else 0
        return self.place + offset if offset else 0

    def target(self, number: int) -> int:
        """Return the position to which a field refers."""
        place = self.field(number)
        assert place
        return place + int(struct.unpack_from("<I", self.content, place)[0])

    def table(self, number: int) -> Table:
        """Return the table in a field."""
        return Table(self.content, self.target(number))

    def tables(self, number: int) -> list[Table]:
        """Return the tables of a vector."""
        start = self.target(number)
        (length,) = struct.unpack_from("<I", self.content, start)
        places = range(start + 4, start + 4 + 4 * length, 4)
        return [Table(self.content, at + struct.unpack_from("<I", self.content, at)[0]) for at in places]

    def text(self, number: int) -> str:
        """Return the text in a field."""
        start = self.target(number)
        (length,) = struct.unpack_from("<I", self.content, start)
        return self.content[start + 4 : start + 4 + length].decode()

    def floats(self, number: int) -> list[float]:
        """Return the floats of a vector."""
        start = self.target(number)
        (length,) = struct.unpack_from("<I", self.content, start)
        return list(struct.unpack_from(f"<{length}f", self.content, start + 4))

    def number(self, number: int, form: str = "B") -> int:
        """Return the number in a field."""
        return int(struct.unpack_from(f"<{form}", self.content, self.field(number))[0])


def metadata_of(content: bytes) -> Table:
    """Return the metadata of a file as a table."""
    model = schema().ModelT.InitFromPackedBuf(content)
    (entry,) = [entry for entry in model.metadata if entry.name.decode() == METADATA]
    buffer = bytes(model.buffers[entry.buffer].data)
    assert buffer[4:8] == b"M001"
    return Table(buffer)


def samples(preprocess: str = "unit", labels: tuple[str, ...] = CLASSES) -> Any:
    """Return what a file reads of samples."""
    return SimpleNamespace(preprocess=load_preprocess(preprocess), score_names=labels)


def mean_colour(scale: float = 1 / 255, zero: int = -128) -> TfliteNetwork:
    """Return a network that gives the mean of each channel."""
    scales = dict.fromkeys("xy", (scale, zero))
    axes = {"axes": np.array([2, 3])}
    node = "y = ReduceMean<keepdims=0>(x, axes)"
    return network_of(quantized(node, {"x": [1, 3, 6, 8]}, [1, 3], scales=scales, plain=axes))


def pixel_scores() -> TfliteNetwork:
    """Return a network with two logits for each pixel."""
    weights = {"w": np.array([[2, 0, -1], [-1, 1, 1]], np.float32).reshape(2, 3, 1, 1)}
    scales = {"x": (1 / 255, -128), "y": (0.03, 0)}
    return network_of(quantized("y = Conv(x, w)", {"x": [1, 3, 6, 8]}, [1, 2, 6, 8], weights, scales=scales))


CLASSIFY = Head("classify", {"scores": "y"}, {"scores": "probabilities"})


@litert
def test_a_classifier_states_its_image_and_its_labels() -> None:
    content, notes = make_tasks_file(mean_colour(), CLASSIFY, samples("tf"), "colours")
    model = metadata_of(content)
    assert (model.text(0), model.text(7)) == ("colours", "1.0.0")
    (graph,) = model.tables(3)
    ((image,), (scores,)) = (graph.tables(number) for number in (2, 3))
    (options,) = image.tables(4)
    assert options.number(0) == 1  # NormalizationOptions
    assert (options.table(1).floats(0), options.table(1).floats(1)) == ([127.5] * 3, [127.5] * 3)
    properties = image.table(3)
    assert (properties.number(0), properties.table(1).number(0)) == (2, 1)  # ImageProperties, RGB
    size = properties.table(1).table(1)
    assert (size.number(0, "I"), size.number(1, "I")) == (8, 6)
    assert (image.table(5).floats(0), image.table(5).floats(1)) == ([1.0] * 3, [-1.0] * 3)
    (labels,) = scores.tables(6)
    assert (labels.text(0), labels.number(2)) == ("labels.txt", 2)  # TENSOR_AXIS_LABELS
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.read("labels.txt") == b"red\ngreen\nblue\n"
        assert [entry.compress_type for entry in archive.infolist()] == [zipfile.ZIP_STORED]
    assert notes == ("mediapipe/model.tflite is for ImageClassifier of MediaPipe Tasks",)
    assert make_tasks_file(mean_colour(), CLASSIFY, samples("tf"), "colours")[0] == content


@litert
def test_the_file_takes_images_with_channels_in_the_last_axis() -> None:
    content, _ = make_tasks_file(mean_colour(), CLASSIFY, samples(), "t")
    image = np.zeros((1, 6, 8, 3), np.float32)
    image[..., 1] = 0.4
    (scores,) = answers(content, XNNPACK, [image])
    np.testing.assert_allclose(scores, [[0, 0.4, 0]], atol=1 / 255)


@litert
def test_constants_that_differ_between_channels_are_in_the_graph() -> None:
    content, _ = make_tasks_file(mean_colour(0.03, 0), CLASSIFY, samples("imagenet-resized"), "t")
    ((image,),) = [graph.tables(2) for graph in metadata_of(content).tables(3)]
    (options,) = image.tables(4)
    assert (options.table(1).floats(0), options.table(1).floats(1)) == ([0.0] * 3, [1.0] * 3)
    (scores,) = answers(content, XNNPACK, [np.full((1, 6, 8, 3), 255, np.float32)])
    np.testing.assert_allclose(scores, [[(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]], atol=0.03)


@litert
def test_a_segmenter_gives_probabilities_in_place_of_logits() -> None:
    head = Head("semantic", {"map": "y"}, {"scores": "logits"}, labels=("red", "other"))
    content, notes = make_tasks_file(pixel_scores(), head, samples(labels=()), "t")
    image = np.zeros((1, 6, 8, 3), np.float32)
    image[..., 0] = 1
    (scores,) = answers(content, XNNPACK, [image])
    assert scores.shape == (1, 6, 8, 2)
    np.testing.assert_allclose(scores[0, 0, 0], [1 / (1 + np.exp(-3)), 1 / (1 + np.exp(3))], atol=0.01)
    assert "ImageSegmenter" in notes[0]


@litert
def test_an_embedding_has_no_labels() -> None:
    content, _ = make_tasks_file(mean_colour(), Head("embedding", {"vector": "y"}), samples(), "t")
    (graph,) = metadata_of(content).tables(3)
    assert graph.tables(3)[0].tables(6) == []
    assert not zipfile.is_zipfile(io.BytesIO(content))


@litert
@pytest.mark.parametrize(
    ("head", "prepared", "problem"),
    [
        (Head("yolov8", {"rows": "y"}), samples(), "no task reads the head yolov8"),
        (CLASSIFY, samples("bgr"), "gives BGR images"),
        (CLASSIFY, samples(labels=("a", "b")), "2 labels for 3 classes"),
        (CLASSIFY, SimpleNamespace(score_names=()), "not declared"),
        (CLASSIFY, samples("multiply=-1"), "not positive"),
        (CLASSIFY, samples("center"), "no step 'center'"),
        (Head("semantic", {"map": "y"}), samples(), "does not read an output"),
        (Head("classify", {"scores": "z"}), samples(), "no output 'z'"),
    ],
)
def test_refuses_what_tasks_cannot_answer(head: Head, prepared: Any, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        make_tasks_file(mean_colour(), head, prepared, "t")


@litert
def test_says_if_tasks_resize_images_in_another_way() -> None:
    _, notes = make_tasks_file(mean_colour(), CLASSIFY, samples("yolo"), "t")
    assert "stretch" in notes[1]


@given(st.sampled_from(sorted(shipped())), st.integers(0, 255), st.integers(0, 2))
def test_the_normalization_is_that_of_the_preprocessing(name: str, value: int, channel: int) -> None:
    preprocess = load_preprocess(name)
    try:
        found = find_normalization(plain(preprocess))
    except ModelError:
        return
    image = np.full((320, 320, 3), value, np.uint8)
    spec = TensorSpec("x", np.dtype(np.float32), (1, 224, 224, 3))
    prepared = np.asarray(preprocess(Picture(image), spec).array)
    expected = (value - found.mean[channel]) / found.std[channel]
    assert prepared[..., 112, 112, channel].item() == pytest.approx(expected, abs=1e-4, rel=1e-5)
