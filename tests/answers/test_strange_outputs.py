"""Give families outputs of any shape and value: a test of fit never raises, and decoding raises only a DataError."""

from __future__ import annotations

import numpy as np
from edgeq_device.answers.decode import decode
from edgeq_device.answers.family import View, all_families
from edgeq_device.answers.head import Head
from edgeq_device.errors import DataError
from edgeq_device.prepare.frame import Frame
from hypothesis import given
from hypothesis import strategies as st

from tests.answers.encodings import SIZE, draw_truth
from tests.answers.test_boxes import CASES

NAMES = ("dets", "labels", "boxes", "scores", "logits", "num_detections", "masks")
# Columns of rows, and sides that fit nothing.
SIDES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 36, 42, 64, 126])
KINDS = st.sampled_from([np.float32, np.float16, np.int64, np.int32, np.uint8, np.bool_])
VALUES = st.sampled_from([0.0, 0.5, 1.0, -1.0, 30.0, 1e30, -1e30, np.nan, np.inf])


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = [draw(st.sampled_from([1, 1, 1, 2])), *draw(st.lists(SIDES, max_size=3))]
    shape = shape if draw(st.booleans()) else shape[1:]
    kind = draw(KINDS)
    noise = np.random.default_rng(draw(st.integers(0, 9))).random(shape)
    values = np.where(noise < 0.5, draw(VALUES), noise * draw(st.sampled_from([1.0, 30.0])))
    with np.errstate(all="ignore"):
        return values.astype(kind)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Return outputs that a family reads, with damage to some of them."""
    _, encode = CASES[draw(st.sampled_from(sorted(CASES)))]
    random = np.random.default_rng(draw(st.integers(0, 3)))
    outputs = encode(draw_truth(random), random)
    for name in draw(st.lists(st.sampled_from(sorted(outputs)), min_size=1, max_size=2)):
        array = outputs.pop(name, None)
        if array is None or (damage := draw(st.sampled_from(["drop", "type", "cut", "value", "axis"]))) == "drop":
            continue
        if damage == "type":
            with np.errstate(all="ignore"):
                array = array.astype(draw(KINDS))
        if damage == "cut":
            axis = draw(st.integers(0, array.ndim - 1))
            array = array.take(range(draw(st.integers(0, array.shape[axis]))), axis=axis)
        if damage == "value" and array.dtype.kind == "f":
            array = np.where(random.random(array.shape) < 0.1, draw(VALUES), array).astype(array.dtype)
        outputs[name] = array[None] if damage == "axis" else array
    return outputs


OUTPUTS = st.one_of(st.dictionaries(st.sampled_from(NAMES), arrays(), max_size=5), damaged())


@given(OUTPUTS, st.booleans(), st.sampled_from([None, 1, 80]))
def test_a_fit_never_raises(outputs: dict[str, np.ndarray], forced: bool, classes: int | None) -> None:
    frame = Frame.of(32, 20).resized(*SIZE)
    for family in all_families():
        fit = family.fit(View(outputs, SIZE, classes, forced=forced))
        if fit is None:
            continue
        head = Head(family.name, fit.outputs, fit.parameters, dict(family.thresholds))
        try:
            answer = decode(outputs, head, frame)
        except DataError:
            assert forced
            continue
        assert np.isfinite(answer.boxes).all()


@given(OUTPUTS, st.data())
def test_heads_of_other_outputs_are_refused(outputs: dict[str, np.ndarray], data: st.DataObject) -> None:
    """A bundle is untrusted: its head may name any outputs and parameters."""
    roles = ("rows", "boxes", "scores", "labels", "dets", "logits", "heat", "sizes", "offsets", "count", "classes")
    named = data.draw(st.dictionaries(st.sampled_from(roles), st.sampled_from(NAMES)))
    keys = ("unit", "scores", "bins", "anchors", "priors", "offset", "numbers", "selected")
    odd = st.sampled_from(["share", "logits", "ssd300", "", -3, 0, 2.5, None, [], {}, [1, 2], float("inf")])
    parameters = data.draw(st.dictionaries(st.sampled_from(keys), odd))
    for family in all_families():
        try:
            decode(outputs, Head(family.name, named, parameters), Frame.of(32, 20).resized(*SIZE))
        except DataError:
            continue
