"""Test that the demo's files match their record: sizes, hashes, shapes, structure and float accuracy."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edgeq import demo
from edgeq.run.session import open_session


def samples(path: object) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    with np.load(str(path), allow_pickle=False) as archive:
        assert sorted(archive.files) == ["image", "label"]
        return archive["image"], archive["label"]


def test_sizes_are_bounded() -> None:
    assert demo.MODEL.stat().st_size < 1_000_000
    assert sum(f.stat().st_size for f in demo.DIRECTORY.iterdir() if f.is_file()) < 1_500_000


def test_provenance_is_complete() -> None:
    record = demo.provenance()
    assert "UCI" in record["data"]["name"]
    assert record["data"]["licence"]
    assert record["preprocessing"]
    assert record["training"]["script"] == "scripts/train_demo.py"
    split = record["split"]
    assert split["train"] + split["validation"] == record["data"]["images"] == 1797


@pytest.mark.parametrize("path", [demo.MODEL, demo.CALIBRATION, demo.VALIDATION], ids=lambda p: p.name)
def test_files_are_those_on_record(path: object) -> None:
    recorded = demo.provenance()["sha256"]
    file = demo.DIRECTORY / str(path)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == recorded[file.name]


@pytest.mark.parametrize("part", ["calibration", "validation"])
def test_samples(part: str) -> None:
    x, y = samples(demo.DIRECTORY / f"{part}.npz")
    assert x.dtype == np.float32
    assert x.shape == (demo.provenance()["split"][part], 1, 16, 16)
    assert x.min() == 0.0
    assert x.max() == 1.0
    assert sorted(set(y.tolist())) == list(range(10))


def test_calibration_and_validation_share_no_sample() -> None:
    calibration, validation = (samples(p)[0] for p in (demo.CALIBRATION, demo.VALIDATION))
    assert not {x.tobytes() for x in calibration} & {x.tobytes() for x in validation}


def test_the_model_has_the_shapes_on_which_schemes_part_ways() -> None:
    model = onnx.load(demo.MODEL)
    onnx.checker.check_model(model, full_check=True)
    assert {i.domain: i.version for i in model.opset_import} == {"": 17}
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    kinds = Counter(node.op_type for node in model.graph.node)
    groups = [a.i for node in model.graph.node for a in node.attribute if a.name == "group"]
    assert kinds["Add"] == 1, "a residual addition"
    assert max(groups) > 1, "a depthwise convolution"
    assert kinds["BatchNormalization"] == kinds["Conv"], "BatchNormalization left unfolded"


def test_float_accuracy_is_the_recorded_one() -> None:
    x, y = samples(demo.VALIDATION)
    session = open_session(demo.MODEL)
    single = np.concatenate([session.run(None, {"image": one[None]})[0] for one in x])
    assert np.mean(single.argmax(axis=1) == y) == pytest.approx(demo.provenance()["float32"]["validation"], abs=1e-6)
    np.testing.assert_allclose(session.run(None, {"image": x})[0], single, atol=1e-4)
