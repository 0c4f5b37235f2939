"""Cut graphs in front of joined rows and of selections: the runner's answers stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgeq_device.answers.decode import decode
from edgeq_device.answers.family import family_names
from edgeq_device.answers.head import Head
from edgeq_device.answers.match import match_objects
from edgeq_device.errors import DataError
from edgeq_device.prepare.frame import Frame
from edgeq_device.program import open_model
from hypothesis import given
from hypothesis import strategies as st

import edgeq
from edgeq.data.samples import open_samples
from edgeq.describe.facts import Exported
from edgeq.describe.read import read_facts
from edgeq.errors import ModelError
from edgeq.measure.find_head import HeadChoice, find_head
from edgeq.measure.inference import infer
from edgeq.model.load import save_model
from edgeq.model.prepare import prepare_model
from edgeq.prove.head_cut import HeadCut, cut_head
from edgeq.run.session import open_session
from tests.graphs import proto

YOLO = Head("yolov8", {"rows": "y"}, {"unit": "pixel"}, {"confidence": 0.25, "iou": 0.7, "limit": 300})
PARTS = """
    b = Slice(x, n0, n4, n1)
    r = Relu(b)
    c = Slice(x, n4, n7, n1)
    s = Sigmoid(c)
"""
JOINED = f"""g (float[1,7,32] x) => (float[1,7,32] y) {{ {PARTS}
    j = Concat<axis=1>(r, s)
    y = Mul(j, px)
}}"""
# Ultralytics, nn/modules/head.py, Detect.postprocess.
SELECTED = f"""g (float[1,7,32] x) => (float[1,8,6] y) {{ {PARTS}
    j = Concat<axis=1>(r, s)
    t = Transpose<perm=[0,2,1]>(j)
    box, score = Split<axis=2>(t, parts)
    m = ReduceMax<axes=[2], keepdims=0>(score)
    v, i = TopK<axis=1>(m, k)
    iu = Unsqueeze(i, n2)
    ib = Expand(iu, box_shape)
    is = Expand(iu, score_shape)
    gb = GatherElements<axis=1>(box, ib)
    gs = GatherElements<axis=1>(score, is)
    f = Flatten<axis=1>(gs)
    best, p = TopK<axis=1>(f, k)
    row = Div(p, classes)
    class = Mod(p, classes)
    ru = Unsqueeze(row, n2)
    re = Expand(ru, box_shape)
    ob = GatherElements<axis=1>(gb, re)
    os = Unsqueeze(best, n2)
    cu = Unsqueeze(class, n2)
    oc = Cast<to=1>(cu)
    y = Concat<axis=2>(ob, os, oc)
}}"""
CONSTANTS: dict[str, Any] = {
    **{f"n{n}": np.array([n]) for n in (0, 1, 2, 4, 7)},
    "px": np.array([16, 16, 16, 16, 1, 1, 1], np.float32).reshape(1, 7, 1),
    "parts": np.array([4, 3]),
    "k": np.array([8]),
    "classes": np.array(3),
    "box_shape": np.array([1, 8, 4]),
    "score_shape": np.array([1, 8, 3]),
}


def cut(folder: Path, text: str, head: Head) -> tuple[HeadCut, Any, Any]:
    """Return the cut of a model, and sessions of the model and of its cut."""
    onnx.save(proto(text, {name: value for name, value in CONSTANTS.items() if name in text}), folder / "m.onnx")
    rows = np.random.default_rng(0).normal(1, 2, (6, 7, 32)).astype(np.float32)
    np.savez(folder / "data.npz", x=rows)
    prepared = prepare_model(folder / "m.onnx", folder / "prepared")
    samples = open_samples(folder / "data.npz", prepared.signature)
    result = cut_head(prepared.model, head, samples, folder)
    save_model(result.model.clone(), folder / "cut.onnx")
    whole, part = open_session(prepared.path), open_session(folder / "cut.onnx")
    for sample in samples:
        expected, answer = decode(infer(whole, sample), head), decode(infer(part, sample), result.head)
        assert len(expected)
        np.testing.assert_allclose(answer.boxes, expected.boxes, atol=0.01)
        np.testing.assert_allclose(answer.scores, expected.scores, atol=1e-5)
        assert (answer.classes == expected.classes).all()
    return result, whole, part


def test_ends_rows_in_front_of_their_join(tmp_path: Path) -> None:
    result, _, _ = cut(tmp_path, JOINED, YOLO)
    assert (result.head.family, result.head.parameters["rows"]) == ("yolov8", ["boxes", "scores"])
    shapes = [tuple(value.shape or ()) for value in result.model.graph.outputs]
    assert shapes == [(1, 4, 32), (1, 3, 32)]
    # The factor of the boxes stays in the graph, and that of the scores is 1.
    assert [node.op_type for node in result.model.graph].count("Mul") == 1
    assert "Concat" not in {node.op_type for node in result.model.graph}


@pytest.mark.skipif("detections" not in family_names(), reason="this runner has no family for selected rows")
def test_ends_a_graph_in_front_of_its_selection(tmp_path: Path) -> None:
    head = Head("detections", {"rows": "y"}, {"unit": "pixel"}, {"confidence": 0.25, "limit": 8})
    result, _, _ = cut(tmp_path, SELECTED, head)
    assert (result.head.family, result.head.parameters["boxes"]) == ("pairs", "corners")
    assert not {"TopK", "GatherElements", "Concat"} & {node.op_type for node in result.model.graph}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("g (float[1,7,32] x) => (float[1,7,32] y) { y = Sigmoid(x) }", "one tensor"),
        (
            """g (float[1,7,32] x) => (float[1,7,32] y) {
                s = Sigmoid(x)
                a = Slice(s, n0, n4, n1)
                c = Slice(s, n4, n7, n1)
                y = Concat<axis=1>(a, c)
            }""",
            "one tensor",
        ),
    ],
)
def test_refuses_rows_that_nothing_joins(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        cut(tmp_path, text, YOLO)


@given(st.data())
def test_pairs_are_the_best_of_all_boxes_and_classes(data: st.DataObject) -> None:
    rows, classes, limit = (data.draw(st.integers(1, most)) for most in (20, 5, 12))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    boxes, logits = random.uniform(0.2, 0.8, (rows, 4)), random.normal(0, 2, (rows, classes))
    axis = data.draw(st.sampled_from([1, 2]))
    outputs = {name: np.moveaxis(array[None], 2, axis) for name, array in (("b", boxes), ("s", logits))}
    parameters = {"boxes": "centre", "unit": "share", "scores": "logits", "axes": [axis, axis]}
    head = Head("pairs", {"boxes": "b", "scores": "s"}, parameters, {"confidence": 0.25, "limit": limit})
    answer = decode(outputs, head, Frame((100, 50), (100, 50)))
    scores = 1 / (1 + np.exp(-logits))
    best = sorted((-scores[r, c], r, c) for r in range(rows) for c in range(classes))[:limit]
    expected = [(r, c) for score, r, c in best if -score > 0.25]
    assert answer.classes.tolist() == [c for _, c in expected]
    for box, (row, _) in zip(answer.boxes, expected, strict=True):
        (x, y), (width, height) = boxes[row, :2] * (100, 50), boxes[row, 2:] * (100, 50)
        np.testing.assert_allclose(box, [x - width / 2, y - height / 2, x + width / 2, y + height / 2])


@pytest.mark.parametrize("parameters", [{}, {"axes": [2]}, {"axes": [7, 2], "boxes": "corners", "unit": "pixel"}])
def test_refuses_a_record_of_pairs_without_axes(parameters: dict[str, Any]) -> None:
    head = Head("pairs", {"boxes": "b", "scores": "s"}, parameters)
    with pytest.raises(DataError, match="does not fit"):
        decode({"b": np.zeros((1, 2, 4)), "s": np.zeros((1, 2, 3))}, head)


@pytest.mark.parametrize(
    "parameters", [{"rows": ["boxes"]}, {"rows": 3, "axes": [1, 1]}, {"rows": ["b"], "axes": [9, 1]}]
)
def test_refuses_a_record_of_parts_that_do_not_join(parameters: dict[str, Any]) -> None:
    head = Head("yolov8", {"boxes": "b"}, parameters)
    with pytest.raises(DataError, match="does not fit"):
        decode({"b": np.zeros((1, 4, 8))}, head)


@pytest.mark.parametrize(
    ("name", "family", "images"),
    [
        ("yolo26n_e2e", "detections", "coco256/val"),
        ("yolo11n_seg", "yolo-seg", "coco256/val"),
        ("yolo11n_pose", "yolo-pose", "yolo11n_pose/data/images/val"),
    ],
)
def test_cuts_real_models(shared_data: Path, tmp_path: Path, name: str, family: str, images: str) -> None:
    if family not in family_names() or not (shared_data / name).is_dir():
        pytest.skip(f"this runner has no family {family}, or {name} is absent")
    prepared = prepare_model(shared_data / name / "model.onnx", tmp_path)
    samples = open_samples(shared_data / images, prepared.signature, preprocess="yolo", count=2)
    facts = read_facts(Exported(prepared.model.metadata_props, shared_data / name / "model.onnx"))
    session, sample = open_session(prepared.path), next(iter(samples))
    head = find_head(session, prepared.signature, sample, facts, HeadChoice(family))
    assert head is not None
    # The answers are compared inside.
    result = cut_head(prepared.model, head, samples, tmp_path)
    boxes, scores = (
        next(value for value in result.model.graph.outputs if value.name == result.head.outputs[role])
        for role in ("boxes", "scores")
    )
    assert boxes.shape is not None
    assert scores.shape is not None
    assert (boxes.shape[1], scores.shape[2]) == (4, boxes.shape[2])
    assert "TopK" not in {node.op_type for node in result.model.graph}


def test_a_bundle_of_a_cut_graph_gives_the_answers_of_the_whole(tmp_path: Path) -> None:
    text = JOINED.replace("float[1,7,32] x", "float[1,7,32] x0").replace("g (", "g (", 1)
    text = text.replace("{ ", "{ x = Conv(x0, w) ", 1)
    weights = np.eye(7, dtype=np.float32)[:, :, None]
    constants = {**{name: value for name, value in CONSTANTS.items() if name in text}, "w": weights}
    onnx.save(proto(text, constants), tmp_path / "m.onnx")
    # Boxes on a grid do not suppress each other.
    rows = np.random.default_rng(0).normal(0, 2, (12, 7, 32)).astype(np.float32)
    rows[:, :4] = np.stack([np.arange(32) % 8, np.arange(32) // 8, np.full(32, 0.8), np.full(32, 0.8)])
    np.savez(tmp_path / "data.npz", x0=rows)
    answers = []
    for cut_graph in (False, True):
        place = tmp_path / f"bundle-{cut_graph}"
        edgeq.package(
            tmp_path / "m.onnx",
            tmp_path / "data.npz",
            place,
            head="yolov8",
            cut_head=cut_graph,
            timed=False,
            emulate=False,
            effort=None,
        )
        with open_model(place) as model:
            assert len(model.outputs) == 1 + cut_graph
            answers.append(model.answer({"x0": rows[:1]}))
    whole, part = answers
    assert len(match_objects(whole, part)[0]) >= 0.8 * len(whole) > 0
