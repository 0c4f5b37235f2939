"""Test that findings on real models agree with what is known of these models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeq.backends.cpu import CpuBackend
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.data.samples import open_samples
from edgeq.measure.debug import Diagnosis, debug
from edgeq.model.prepare import prepare_model
from edgeq.scheme import Scheme
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow


def findings(folder: Path, work: Path, name: str, images: Path, count: int, **scheme: Any) -> Diagnosis:
    model, spec = folder / name / "model.onnx", REPOSITORY / "benchmarks" / "specs" / f"{name}.toml"
    if not (model.exists() and images.is_dir()):
        pytest.skip(f"{name} or its images are not in shared/data")
    prepared = prepare_model(model, work)
    statistics = collect(prepared.model, open_samples(images / "calib", prepared.signature, preprocess=spec, count=8))
    chosen_scheme = Scheme(**scheme)
    ranges = derive_ranges(statistics, activation_type=chosen_scheme.activation_type)
    artifact = CpuBackend().build(prepared, ranges, chosen_scheme, work / "int8.onnx")
    return debug(model, artifact.model, images / "val", preprocess=spec, count=count, worst=6)


def test_the_first_convolutions_of_yolox_nano(shared_data: Path, tmp_path: Path) -> None:
    diagnosis = findings(shared_data, tmp_path, "yolox_nano", shared_data / "coco256", 2)
    computing = [a for a in diagnosis.comparison.activations if a.op_type in ("Conv", "Mul", "Sigmoid")]
    position = {a.name: place for place, a in enumerate(computing)}
    worst = diagnosis.error_sources[:3]
    assert worst
    assert all(position[error_source.name] < 9 for error_source in worst), "three convolutions, each with its SiLU"
    assert {error_source.cause for error_source in worst} == {"range"}
    assert diagnosis.error_sources[0].output_sqnr_db < 12


def test_unequal_channels_of_mobilenet_v1(shared_data: Path, tmp_path: Path) -> None:
    diagnosis = findings(
        shared_data, tmp_path, "mobilenet_v1_0.25_224", shared_data / "imagenet-sample", 6, per_channel=False
    )
    assert diagnosis.prepared
    assert diagnosis.optimised.sqnr_db < 3
    nodes = [error_source.node for error_source in diagnosis.error_sources]
    assert {"Conv2d_2_depthwise", "Conv2d_3_depthwise", "Conv2d_13_depthwise"} <= set(nodes)
    assert {error_source.cause for error_source in diagnosis.error_sources} == {"weights"}
    assert all(error_source.exclude == (error_source.node,) for error_source in diagnosis.error_sources)
