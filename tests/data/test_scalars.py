"""Test every form of data for a model with a state and a scalar that chooses an If's branch, as in speech models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from edgeq_device.bundle.package import open_bundle
from edgeq_device.prepare.arrays import read_arrays
from onnx import numpy_helper

from edgeq.bundle.verify import verify_bundle
from edgeq.data.samples import open_samples
from edgeq.jobs.package import package
from edgeq.model.load import model_signature
from tests import graphs

VOICE = """
voice (float[batch, samples] input, float[2, batch, 4] state, int64 rate)
   => (float[batch, 4] score, float[2, batch, 4] next)
<int64 wide = {16000}, int64[1] one = {1}, int64[2] both = {1, 2}, float[4] tap = {0.5, -0.25, 1, 0.125}> {
  [cut] x = Unsqueeze (input, one)
  [taps] w = Unsqueeze (tap, taps_axes)
  [is_wide] c = Equal (rate, wide)
  [features] f = If (c) <
    then_branch = a () => (float[batch, 1, steps] ya) { [conv16] ya = Conv <strides = [4]> (x, w) },
    else_branch = b () => (float[batch, 1, steps] yb) { [conv8] yb = Conv <strides = [2]> (x, w) }>
  [mean] m = ReduceMean <axes = [1, 2], keepdims = 0> (f)
  [column] k = Unsqueeze (m, one)
  [spread] s = MatMul (k, mix)
  [next] next = Add (state, s)
  [squash] t = Tanh (next)
  [last] score = ReduceMean <axes = [0], keepdims = 0> (t)
}
"""
Feeds = dict[str, np.ndarray[Any, Any]]


def feeds(count: int = 4) -> list[Feeds]:
    random = np.random.default_rng(0)
    return [
        {
            "input": random.standard_normal((1, 32)).astype(np.float32),
            "state": random.standard_normal((2, 1, 4)).astype(np.float32),
            "rate": np.array((16000, 8000)[i % 2], np.int64),
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = graphs.proto(VOICE)
    random = np.random.default_rng(1)
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 1], np.int64), "taps_axes"))
    model.graph.initializer.append(numpy_helper.from_array(random.standard_normal((1, 4)).astype(np.float32), "mix"))
    path = tmp_path_factory.mktemp("voice") / "voice.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def npz(folder: Path) -> Any:
    for i, one in enumerate(feeds()):
        np.savez(folder / f"{i}.npz", **one)  # type: ignore[arg-type]
    return folder


def pb(folder: Path) -> Any:
    for i, one in enumerate(feeds()):
        case = folder / f"test_data_set_{i}"
        case.mkdir()
        for number, (name, value) in enumerate(one.items()):
            (case / f"input_{number}.pb").write_bytes(numpy_helper.from_array(value, name).SerializeToString())
    return folder


def stacked(folder: Path) -> Any:
    np.savez(folder / "all.npz", **{name: np.stack([one[name] for one in feeds()]) for name in feeds()[0]})  # type: ignore[arg-type]
    return folder / "all.npz"


def single_values(folder: Path) -> Any:
    return [{**one, "rate": one["rate"].reshape(1)} for one in feeds()]


def numbers(folder: Path) -> Any:
    return iter([{**one, "rate": int(one["rate"])} for one in feeds()])


def tuples(folder: Path) -> Any:
    return lambda: (tuple(one.values()) for one in feeds())


@pytest.mark.parametrize("form", [npz, pb, stacked, single_values, numbers, tuples])
def test_every_form_gives_the_same_samples(voice: Path, tmp_path: Path, form: Callable[[Path], Any]) -> None:
    found = list(open_samples(form(tmp_path), model_signature(voice)))
    session = onnxruntime.InferenceSession(voice, providers=["CPUExecutionProvider"])
    assert len(found) == 4
    for sample, expected in zip(found, feeds(), strict=True):
        assert sample.inputs["rate"].shape == ()
        for one, other in zip(session.run(None, dict(sample.inputs)), session.run(None, expected), strict=True):
            np.testing.assert_array_equal(one, other)


def test_one_value_serves_all_slices_of_a_file(voice: Path, tmp_path: Path) -> None:
    arrays = {name: np.stack([one[name] for one in feeds()]) for name in ("input", "state")}
    np.savez(tmp_path / "all.npz", rate=np.array(8000), **arrays)  # type: ignore[arg-type]
    found = list(open_samples(tmp_path / "all.npz", model_signature(voice)))
    assert [(s.inputs["input"].shape, int(s.inputs["rate"])) for s in found] == [((1, 32), 8000)] * 4
    raw = list(open_samples(tmp_path / "all.npz", model_signature(voice), preprocess="multiply=2,input=input"))
    np.testing.assert_array_equal(raw[1].inputs["input"], 2 * feeds()[1]["input"])
    assert raw[1].inputs["rate"].shape == ()


def test_from_the_samples_to_the_device(voice: Path, tmp_path: Path) -> None:
    package(voice, feeds(), tmp_path / "bundle", timed=False, emulate=False)
    assert verify_bundle(tmp_path / "bundle").passed
    with open_bundle(tmp_path / "bundle") as bundle:
        (variant,) = bundle.components["model"]
        assert read_arrays(variant.cases[0].inputs)["rate"].shape == ()
