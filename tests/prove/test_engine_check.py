from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from edgeq.emulate.probe import build_integer_model
from edgeq.prove.engine_check import check_engine
from edgeq.run.engines import load_engines
from edgeq.run.session import SessionSettings, open_session
from tests import fake_engine
from tests.measure.fakes import FakeSession
from tests.plugins import needs_plugin


def test_the_integers_are_exact() -> None:
    weights = np.random.default_rng(0).integers(-63, 64, (3, 8)).astype(np.int8)
    samples = np.random.default_rng(1).integers(0, 256, (4, 8)).astype(np.float32)
    for found in open_session(build_integer_model(weights)).run(None, {"x": samples[:, :, None, None]}):
        np.testing.assert_array_equal(found.reshape(4, 3), samples @ weights.T.astype(np.float32))


def test_wrong_answers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, line = check_engine(fake_engine.install(tmp_path, monkeypatch, "answers wrong"), ("bf16",))
    assert not right
    assert "int8 outputs are wrong by up to 0.001 of the largest" in line
    assert "f32 is not float32: 60.0 dB against ONNX Runtime's, at least 90 needed" in line


def test_a_crash_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_engine(fake_engine.install(tmp_path, monkeypatch, "crashes at load"), ())
    assert found == (False, "the process of fake ended: signal SIGSEGV")


@needs_plugin("openvino")
def test_the_installed_engine_is_right() -> None:
    right, line = check_engine(load_engines()["openvino"], ())
    assert right, line


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.001, False)])
def test_a_gpu_must_compute_float32_where_that_is_requested(
    factor: float, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class There:
        def open(self, model: Path, settings: SessionSettings) -> FakeSession:
            session = open_session(model)
            names = [spec.name for spec in session.get_outputs()]

            def run(feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
                return dict(zip(names, (factor * value for value in session.run(None, feed)), strict=True))

            return FakeSession(run, names)

    monkeypatch.setattr("edgeq.prove.engine_check.start_engine", lambda engine: nullcontext(There()))
    found, line = check_engine(load_engines()["cuda"], ("tf32",))
    assert found is right
    assert ("f32 is not float32: 60.0 dB against ONNX Runtime's, at least 90 needed" in line) is not right
    assert (", tf32 inf dB" in line) is right


@pytest.mark.parametrize("wrong_by", [0.0, 8.0])
def test_an_npu_is_held_against_the_cpu_on_a_convolution_between_pairs(
    wrong_by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class There:
        def open(self, model: Path, settings: SessionSettings) -> FakeSession:
            session = open_session(model)
            return FakeSession(lambda feed: {"y": session.run(None, feed)[0] + wrong_by}, ["y"])

    monkeypatch.setattr("edgeq.prove.engine_check.start_engine", lambda engine: nullcontext(There()))
    right, line = check_engine(load_engines()["qnn"], ())
    assert right == (wrong_by == 0)
    assert "a Q/DQ convolution in its simulator: " in line or not load_engines()["qnn"].simulated
