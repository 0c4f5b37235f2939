"""Test that samples run at once only if each of them then gets the same output as alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq import demo
from edgeq.data.sample import Sample
from edgeq.data.samples import open_samples
from edgeq.measure.task import make_task
from edgeq.model.load import model_signature
from edgeq.run.session import open_session
from edgeq.tuning.accuracy import AccuracyMeter
from edgeq.tuning.batches import find_batch_size, infer_all
from tests.graphs import proto

RANDOM = np.random.default_rng(0)
ALONE = "g (float[N,3] x) => (float[N,3] y) { y = Softmax (x) }"
BESIDE = "g (float[N,3] x) => (float[N,3] y) { m = ReduceMax <keepdims = 1> (x) y = Div (x, m) }"
DYNAMIC = "g (float[N,3] x) => (uint8[N,3] y) { y, c, z = DynamicQuantizeLinear (x) }"
FIXED = "g (float[1,3] x) => (float[1,3] y) { y = Softmax (x) }"
INSIDE = "g (float[N,3] x) => (float[N,3] y) { r = Reshape (x, s) y = Softmax (r) }"
WHOLE = "g (float[N,3] x) => (float[1,3] y) { y = ReduceSum <keepdims = 1> (x, a) }"


def session_of(body: str) -> Any:
    made = proto(body)
    held = {"a": np.array([0]), "s": np.array([1, 3])}
    made.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in held.items())
    return open_session(made.SerializeToString())


def samples_of(*shapes: tuple[int, ...], **context: Any) -> list[Sample]:
    return [Sample(f"{i}", {"x": RANDOM.random(s).astype(np.float32)}, None, context) for i, s in enumerate(shapes)]


@pytest.mark.parametrize(
    ("body", "at_once"),
    [(ALONE, True), (BESIDE, False), (DYNAMIC, False), (FIXED, False), (WHOLE, False), (INSIDE, False)],
)
def test_runs_only_independent_rows_at_once(body: str, at_once: bool) -> None:
    assert (find_batch_size(session_of(body), samples_of((1, 3), (1, 3), (1, 3))) > 1) is at_once


def test_only_single_rows_of_one_shape_and_few_bytes() -> None:
    session = session_of(ALONE.replace("3", "M"))
    assert find_batch_size(session, samples_of((1, 3), (1, 3))) == 32
    assert find_batch_size(session, samples_of((1, 3), (1, 4))) == 1
    assert find_batch_size(session, samples_of((2, 3), (2, 3))) == 1
    assert find_batch_size(session, samples_of((1, 3))) == 1
    assert find_batch_size(session, samples_of((1, 3), (1, 3), rows=({},))) == 1
    assert find_batch_size(session, samples_of((1, 2**19), (1, 2**19))) == 2
    assert [a["y"].shape for a in infer_all(session, samples_of((1, 3), (1, 4)), model="it")] == [(1, 3), (1, 4)]


def test_the_figures_are_those_of_samples_one_by_one(tmp_path: Path) -> None:
    samples = open_samples(demo.VALIDATION, model_signature(demo.MODEL), count=70)
    found = []
    for together in (False, True):
        (folder := tmp_path / str(together)).mkdir()
        meter = AccuracyMeter(samples, demo.MODEL, folder, task=make_task("classification"))
        session, done = open_session(demo.MODEL), []
        steps = [
            meter.assess("it", lambda session=session: session, n, done.append, together=together) for n in (9, 70)
        ]
        found.append((steps, sum(done)))
    (alone, _), (at_once, count) = found
    assert count == 70
    for one, other in zip(alone, at_once, strict=True):
        assert other.cosine == pytest.approx(one.cosine)  # the sums run in another order
        assert dataclasses.replace(other, cosine=one.cosine) == one
