"""All of edgeq's own functions that take data accept a CalibrationDataReader."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import edgeq
from compat.networks import Reader, images
from edgeq.jobs.calibrate import calibrate
from edgeq.model.load import model_signature
from edgeq.util.records import plain


def test_quantize_and_package(model: Path, tmp_path: Path) -> None:
    given = edgeq.quantize(model, Reader(), tmp_path / "q.onnx", validation=Reader(), timed=False)
    listed = edgeq.quantize(model, edgeq.Data(images()), tmp_path / "q2.onnx", timed=False)
    assert given.output.read_bytes() == listed.output.read_bytes()
    edgeq.package(model, Reader(), tmp_path / "bundle", timed=False)
    assert plain(edgeq.verify(tmp_path / "bundle"))


def test_calibrate_and_samples(model: Path, tmp_path: Path) -> None:
    statistics = calibrate(model, Reader(), tmp_path / "statistics")
    assert statistics.samples == len(images())
    samples = edgeq.open_samples(Reader(), model_signature(model))
    for sample, wanted in zip(samples, images(), strict=True):
        np.testing.assert_array_equal(sample.inputs["x"], wanted["x"])


class Rewound(Reader):
    def rewind(self) -> None:
        self._samples = iter(images())


def test_a_reader_that_was_read_is_rewound(model: Path) -> None:
    reader = Rewound([])
    assert reader.get_next() is None
    assert len(edgeq.open_samples(reader, model_signature(model))) == len(images())
