"""Test the way from a model file to an artifact: what is written, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq import demo
from edgeq.backends.base import backend_for
from edgeq.backends.systolic.compile import SystolicBackend
from edgeq.backends.systolic.estimate import place
from edgeq.backends.systolic.program import Conv
from edgeq.backends.systolic.save import load_program
from edgeq.backends.systolic.simulate import simulate
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.data.open_source import Data
from edgeq.data.samples import Samples, open_samples
from edgeq.errors import CalibrationError, HardwareError, ModelError, UsageError
from edgeq.hardware.target import resolve
from edgeq.jobs.package import package
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.run.session import open_session
from edgeq.scheme import Scheme
from tests.backends.systolic.graphs import GraphBuilder

SCHEME = Scheme(format="QOperator", activation_type="int8", activation_symmetric=True, per_channel=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepare_model(demo.MODEL, tmp_path_factory.mktemp("prepared"))


def samples(prepared: PreparedModel, count: int = 40) -> Samples:
    with np.load(demo.CALIBRATION) as archive:
        images = archive["image"][:count]
    return open_samples([{"image": image[None]} for image in images], prepared.signature)


def ranges(prepared: PreparedModel, method: str = "minmax") -> dict:
    statistics = collect(prepared.model, samples(prepared), model_digest=prepared.digest)
    return derive_ranges(statistics, method, activation_type="int8", symmetric=True)


def test_the_demo_model_becomes_an_artifact(prepared: PreparedModel, tmp_path: Path) -> None:
    backend = backend_for(resolve("gemmini"))
    artifact = backend.build(prepared, ranges(prepared), SCHEME, tmp_path / "demo.onnx", samples=samples(prepared))
    onnx.checker.check_model(str(artifact.model), full_check=True)
    assert set(artifact.files) == {"demo.program.npz", "demo.dialect.onnx"}
    assert artifact.coverage is not None
    assert artifact.coverage.int8_mac_share == 1.0
    assert "100.0% of the multiply-accumulates run on the array" in artifact.notes[0]
    program = load_program(artifact.files["demo.program.npz"])
    with np.load(demo.VALIDATION) as archive:
        images, labels = archive["image"][:200], archive["label"][:200]
    twin = open_session(artifact.model).run(None, {"image": images})[0]
    simulated = simulate(program, {"image": images}).tensors["logits"]
    np.testing.assert_array_equal(twin, simulated)
    assert (simulated.argmax(1) == labels).mean() > 0.98
    assert place(program).array_share == 1.0


@pytest.mark.parametrize("method", ["percentile", "mse", "entropy"])
def test_any_calibration_method_will_do(method: str, prepared: PreparedModel, tmp_path: Path) -> None:
    spans = ranges(prepared, method)
    artifact = SystolicBackend().build(prepared, spans, SCHEME, tmp_path / "demo.onnx")
    with np.load(demo.VALIDATION) as archive:
        images, labels = archive["image"][:200], archive["label"][:200]
    twin = open_session(artifact.model).run(None, {"image": images})[0]
    assert (twin.argmax(1) == labels).mean() > 0.97


def test_the_same_input_gives_the_same_bytes(prepared: PreparedModel, tmp_path: Path) -> None:
    spans = ranges(prepared)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        SystolicBackend().build(prepared, spans, SCHEME, tmp_path / name / "m.onnx", samples=samples(prepared))
    for name in ("m.onnx", "m.program.npz", "m.dialect.onnx"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_other_arrays_have_other_tiles(prepared: PreparedModel, tmp_path: Path) -> None:
    spans = ranges(prepared)
    widths = {}
    for dim in (8, 32):
        artifact = SystolicBackend({"dim": dim}).build(prepared, spans, SCHEME, tmp_path / f"{dim}.onnx")
        program = load_program(artifact.files[f"{dim}.program.npz"])
        assert program.array.dim == dim
        widths[dim] = max(len(step.tiles) for step in program.steps if isinstance(step, Conv))
    assert widths[8] > widths[32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_symmetric": False}, "activation_symmetric = False"),
        ({"activation_type": "uint8"}, "activation_type = uint8"),
        ({"per_channel": True}, "per_channel = True"),
        ({"mode": "dynamic"}, "mode = dynamic"),
    ],
)
def test_schemes_that_the_array_cannot_do_are_refused(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SystolicBackend().check(SCHEME.replace(**change))


def test_a_target_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(HardwareError, match="scratchpad_kib"):
        SystolicBackend({"dim": 32, "scratchpad_kib": 256, "scratchpad_bank_rows": 4096}).check(SCHEME)


def test_a_missing_range_is_named(prepared: PreparedModel, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="has no calibrated range"):
        SystolicBackend().build(prepared, {}, SCHEME, tmp_path / "m.onnx")


def test_a_model_with_nothing_for_the_array_is_refused(tmp_path: Path) -> None:
    b = GraphBuilder(np.random.default_rng(0))
    onnx.save(b.model(b.node("Sigmoid", ["input"], b.shapes["input"])), tmp_path / "m.onnx")
    prepared = prepare_model(tmp_path / "m.onnx", tmp_path)
    with pytest.raises(ModelError, match="no layer of it runs on the array"):
        SystolicBackend().build(prepared, {}, SCHEME, tmp_path / "q.onnx")


def test_depthwise_layers_leave_the_array_only_where_it_pays(tmp_path: Path) -> None:
    b = GraphBuilder(np.random.default_rng(1), input_shape=(1, 3, 12, 12))
    x = b.node("Relu", [b.conv("input", 16, bias=False)], (1, 16, 12, 12))
    y = b.conv(b.conv(x, 16, groups=16), 8)
    # A faint channel is followed by large weights. With one scale for 16 channels, all others become zero.
    faint, loud = b.constants[0], b.constants[1]
    lowered, raised = (onnx.numpy_helper.to_array(t).copy() for t in (faint, loud))
    lowered[5], raised[5] = lowered[5] * 1e-5, 4000
    faint.CopyFrom(onnx.numpy_helper.from_array(lowered, faint.name))
    loud.CopyFrom(onnx.numpy_helper.from_array(raised, loud.name))
    onnx.save(b.model(y), tmp_path / "m.onnx")
    prepared = prepare_model(tmp_path / "m.onnx", tmp_path)
    inputs = open_samples([{"input": x[None]} for x in b.samples(16)], prepared.signature)
    statistics = collect(prepared.model, inputs, model_digest=prepared.digest)
    spans = derive_ranges(statistics, "minmax", activation_type="int8", symmetric=True)
    artifact = SystolicBackend().build(prepared, spans, SCHEME, tmp_path / "q.onnx", samples=inputs)
    assert "run on the core, with a scale for each channel" in artifact.notes[0]
    without = SystolicBackend().build(prepared, spans, SCHEME, tmp_path / "p.onnx")
    assert "run on the core" not in without.notes[0]


@pytest.mark.slow
def test_a_bundle_carries_the_files_of_the_array(tmp_path: Path) -> None:
    report = package(
        demo.MODEL, Data(demo.CALIBRATION, count=40), tmp_path / "dist", targets=["gemmini"], timed=False, selftest=1
    )
    folder = report.bundle / "files" / "gemmini"
    assert {file.name for file in folder.iterdir()} == {"c", "model.dialect.onnx", "model.program.npz"}
    program = load_program(folder / "model.program.npz")
    with np.load(demo.VALIDATION) as archive:
        images = archive["image"][:3]
    twin = open_session(report.bundle / "models" / "model" / "gemmini" / "model.onnx").run(None, {"image": images})[0]
    np.testing.assert_array_equal(simulate(program, {"image": images}).tensors["logits"], twin)
    assert report.variants["gemmini"].proof.coverage.int8_mac_share == 1.0
