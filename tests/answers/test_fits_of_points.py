"""Give the families of keypoints, faces and masks outputs that do not belong to them."""

from __future__ import annotations

import numpy as np
from edgeq_device.answers.decode import decode
from edgeq_device.answers.family import View, load_family
from edgeq_device.answers.head import Head
from edgeq_device.errors import DataError
from edgeq_device.prepare.frame import Frame
from hypothesis import given, settings
from hypothesis import strategies as st

FAMILIES = (
    *("yolo-pose", "yolo-pose-nms", "yunet", "scrfd", "retinaface", "heatmaps", "simcc", "movenet"),
    *("movenet-multipose", "mask-rcnn", "mlsd", "yolo-seg"),
)
SIDES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 10, 17, 56, 64])


@st.composite
def outputs(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Draw up to four arrays of strange shapes and values."""
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    arrays = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        shape = draw(st.lists(SIDES, max_size=4))
        array = random.uniform(0, 1, shape) * draw(st.sampled_from([1, -1, 100, np.inf, np.nan]))
        arrays[name] = np.asarray(array, draw(st.sampled_from([np.float32, np.float64])))
        if draw(st.booleans()) and np.isfinite(array).all():
            arrays[name] = np.asarray(array, np.int64)
    return arrays


@settings(max_examples=300, deadline=None)
@given(
    outputs(),
    st.sampled_from([(0, 0), (64, 64), (256, 192)]),
    st.sampled_from([None, 1, 2, 80]),
    st.sampled_from([None, (17, 3), (5, 2), (0, 0)]),
    st.booleans(),
)
def test_a_fit_never_raises_and_can_be_decoded(
    arrays: dict[str, np.ndarray],
    size: tuple[int, int],
    classes: int | None,
    keypoints: tuple[int, int] | None,
    forced: bool,
) -> None:
    view = View(arrays, size, classes, keypoints, forced=forced)
    for name in FAMILIES:
        with np.errstate(all="ignore"):
            fit = load_family(name).fit(view)
            if fit is None:
                continue
            try:
                answer = decode(arrays, Head(name, fit.outputs, fit.parameters), Frame.of(40, 30).resized(*size))
            except DataError:
                # The user's choice is checked by shapes only.
                assert forced
            else:
                assert np.isfinite(answer.boxes).all()


@settings(max_examples=100, deadline=None)
@given(outputs(), st.sampled_from(FAMILIES), st.integers(0, 20))
def test_outputs_of_another_model_are_a_clear_error(arrays: dict[str, np.ndarray], name: str, keypoints: int) -> None:
    names = list(arrays)
    roles = ("rows", "prototypes", "boxes", "labels", "masks", "heatmaps", "x", "y", "points", "centres")
    roles += ("scores", "displacements", "locations", "confidences", "landmarks", "1_8", "1b_8", "4_8", "10_8")
    head = Head(name, {role: names[place % len(names)] for place, role in enumerate(roles)}, {"keypoints": keypoints})
    with np.errstate(all="ignore"):
        try:
            answer = decode(arrays, head, Frame.of(40, 30).resized(64, 64))
        except DataError:
            return
    assert len(answer.boxes) == len(answer.scores)
