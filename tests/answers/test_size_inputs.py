"""Run a model that learns the size of the stored image from a second input, as a device does."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from edgeq_device.answers.head import Head
from edgeq_device.errors import BundleError, DataError
from edgeq_device.program import Model
from PIL import Image

from tests.graphs import proto

# The whole image as one object, in the pixels that `orig_target_sizes` states.
DETECTOR = """g (float[1, 3, 8, 8] images, int64[1, 2] orig_target_sizes) =>
        (int64[1, 1] labels, float[1, 1, 4] boxes, float[1, 1] scores)
    <int64[3] shape = {1, 1, 2}, int64[2] score = {1, 1}> {
        sizes = Cast <to = 1> (orig_target_sizes)
        far = Reshape (sizes, shape)
        near = Sub (far, far)
        boxes = Concat <axis = 2> (near, far)
        mean = ReduceMean <axes = [0, 1, 2, 3], keepdims = 0> (images)
        rest = Sub (mean, mean)
        certain = Exp (rest)
        scores = Reshape (certain, score)
        labels = Cast <to = 7> (scores)
    }"""
STEPS = [
    {"op": "resize", "size": [8, 8], "filter": "bilinear"},
    {"op": "dtype", "dtype": "float32"},
    {"op": "layout", "axes": "NCHW"},
]


def open_detector(sizes: dict[str, str]) -> Model:
    """Return the model of a bundle with this detector, without writing the bundle."""
    model = object.__new__(Model)
    model.session = onnxruntime.InferenceSession(proto(DETECTOR).SerializeToString())
    model._specs = {spec.name: spec for spec in model.session.get_inputs()}
    model.inputs = tuple(model._specs)
    model._record = {"steps": STEPS}
    roles = {role: role for role in ("boxes", "labels", "scores")}
    parameters = {"frame": "image", "inputs": sizes} if sizes else {}
    model.head = Head("rtdetr-official", roles, parameters, {"confidence": 0.5})
    return model


def test_the_size_of_the_stored_image_is_filled_in() -> None:
    picture = Image.new("RGB", (50, 20), (9, 9, 9))
    answer = open_detector({"orig_target_sizes": "stored width, height"}).answer(picture)
    assert answer.boxes.tolist() == [[0, 0, 50, 20]]
    assert answer.image_size == (50, 20)
    swapped = open_detector({"orig_target_sizes": "stored height, width"}).answer(picture)
    assert swapped.boxes.tolist() == [[0, 0, 20, 50]]


def test_unknown_sizes_and_inputs_are_refused() -> None:
    picture = Image.new("RGB", (50, 20))
    with pytest.raises(BundleError, match="does not know the size 'area'"):
        open_detector({"orig_target_sizes": "area"}).answer(picture)
    with pytest.raises(DataError, match="several inputs"):
        open_detector({}).answer(picture)


def test_scales_are_those_of_the_prepared_image() -> None:
    """PaddleDetection's scale_factor is height and width."""
    feeds = open_detector({"orig_target_sizes": "input height, width"}).prepare(Image.new("RGB", (50, 20)))
    assert feeds["orig_target_sizes"].tolist() == [[8, 8]]
    assert feeds["orig_target_sizes"].dtype == np.int64
