"""A calibration keeps the float model's outputs as the model computes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.calibration.collect import FloatOutputs, PassLimits, collect
from edgeq.data.open_source import Data
from edgeq.data.samples import Samples, open_samples
from edgeq.model.load import model_signature, read_model
from edgeq.run.session import open_session
from tests.backends.build import random, residual


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    path.write_bytes(residual().SerializeToString())
    np.savez(tmp_path / "calib.npz", x=random(9, 8, 8, 8))
    return path


def samples_of(model: Path) -> Samples:
    return open_samples(Data(str(model.parent / "calib.npz")), model_signature(model))


def test_they_are_the_models_in_the_order_of_the_samples(model: Path) -> None:
    loaded, samples, session = read_model(model), samples_of(model), open_session(model)
    outputs = FloatOutputs(loaded, len(samples))
    with_them = collect(loaded, samples, outputs=outputs)
    (name,) = outputs.names
    for found, sample in zip(outputs.all(), samples, strict=True):
        np.testing.assert_allclose(found[name], session.run([name], dict(sample.inputs))[0], rtol=1e-4, atol=1e-5)
    assert with_them == collect(loaded, samples), "statistics do not change for it"


def test_drops_outputs_if_memory_needs_several_passes(model: Path) -> None:
    loaded, samples = read_model(model), samples_of(model)
    outputs = FloatOutputs(loaded, len(samples))
    collect(loaded, samples, outputs=outputs, limits=PassLimits(memory=4096))
    assert outputs.names
    assert outputs.all() == ()


def test_large_outputs_and_free_sizes_are_not_kept(model: Path) -> None:
    loaded = read_model(model)
    assert FloatOutputs(loaded, 10**7).names == ()
    (output,) = loaded.graph.outputs
    output.shape = None
    assert FloatOutputs(loaded, 1).names == ()
