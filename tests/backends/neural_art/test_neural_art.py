"""Test the files for ST's Neural-ART: their types, their opset, the scales of sums, and the form with int8 ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import edgeq
from edgeq.backends.base import Artifact, backend_for
from edgeq.backends.neural_art.backend import compiler_opset, share_sums
from edgeq.backends.neural_art.ports import MODEL, with_integer_ports, write_integer_form
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import Range, derive_ranges
from edgeq.data.samples import open_samples
from edgeq.errors import ModelError, UsageError
from edgeq.hardware.target import resolve
from edgeq.model.convert import from_proto
from edgeq.model.load import read_unchecked, save_model
from edgeq.model.opset import lower_opset
from edgeq.model.prepare import prepare_model
from edgeq.run.session import SessionSettings, open_session
from tests.graphs import proto

NET = """g (float[1,3,8,8] x) => (float[1,4] y) {
    [first] a = Conv<pads=[1,1,1,1]>(x, w, b)
    [clamp] r = Relu(a)
    [deep] d = Conv<pads=[1,1,1,1], group=4>(r, v)
    [sum] s = Add(r, d)
    [mean] m = GlobalAveragePool(s)
    [flat] f = Flatten(m)
    [dense] y = Gemm<transB=1>(f, g2, b)
}"""


def weights() -> dict[str, np.ndarray]:
    """Return random weights."""
    random = np.random.default_rng(0)
    shapes = {"w": (4, 3, 3, 3), "b": (4,), "v": (4, 1, 3, 3), "g2": (4, 4)}
    return {name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def save_net(folder: Path, text: str = NET) -> tuple[Path, Path]:
    """Write the model and samples for it, and return both paths."""
    onnx.save(proto(text, weights()), folder / "net.onnx")
    np.savez(folder / "data.npz", x=np.random.default_rng(1).normal(0, 1, (8, 3, 8, 8)).astype(np.float32))
    return folder / "net.onnx", folder / "data.npz"


def build(folder: Path, text: str = NET, *, options: Mapping[str, str] | None = None, **scheme: Any) -> Artifact:
    """Build the model for the STM32N6."""
    model, data = save_net(folder, text)
    prepared = prepare_model(model, folder / "prepared")
    samples = open_samples(data, prepared.signature)
    ranges = derive_ranges(collect(prepared.model, samples, model_digest=prepared.digest), "minmax")
    target = resolve("stm32n6")
    if options is not None:
        object.__setattr__(target, "device", {**target.device, "engine_options": options})
    chosen = target.profile.scheme.replace(**scheme)
    return backend_for(target).configured(target, {}, {}).build(prepared, ranges, chosen, folder / "q.onnx")


def input_scales(model: Path, name: str) -> set[float]:
    """Return the scales of the inputs of a node."""
    graph = onnx.load(model).graph
    constants = {value.name: onnx.numpy_helper.to_array(value) for value in graph.initializer}
    makers = {output: node for node in graph.node for output in node.output}
    (node,) = (node for node in graph.node if node.name == name)
    return {float(constants[makers[value].input[1]]) for value in node.input}


def test_quantize_proves_a_file_of_signed_integers(tmp_path: Path) -> None:
    model, data = save_net(tmp_path)
    report = edgeq.quantize(model, data, tmp_path / "n6.onnx", target="stm32n6", timed=False)
    assert report.proof.agreement.sqnr_db > 20
    written = onnx.load(report.output)
    constants = [v for v in written.graph.initializer if v.name.endswith("zero_point")]
    assert {v.data_type for v in constants} <= {onnx.TensorProto.INT8, onnx.TensorProto.INT32}
    assert written.opset_import[0].version <= compiler_opset().newest
    assert any("never run" in note for note in report.notes)


def test_both_inputs_of_a_sum_have_one_scale(tmp_path: Path) -> None:
    assert len(input_scales(build(tmp_path).model, "sum")) == 1


def test_without_the_option_each_input_of_a_sum_has_its_scale(tmp_path: Path) -> None:
    assert len(input_scales(build(tmp_path, options={}).model, "sum")) == 2


def test_sums_share_ranges_through_operators_that_move_values() -> None:
    text = """g (float[1,4] x, float[1,4] z, float[1,2,2] u) => (float[1,4] y) {
        [flat] f = Flatten(u) [one] s = Add(x, f) [two] y = Add(s, z)
    }"""
    spans = {
        "x": Range(0, 1),
        "z": Range(-8, 1),
        "u": Range(-2, 2),
        "f": Range(-2, 2),
        "s": Range(0, 3),
        "y": Range(0, 9),
    }
    shared = share_sums(from_proto(proto(text)), spans, {"one", "two"})
    assert shared["x"] == shared["f"] == shared["u"] == Range(-2, 2)
    assert shared["s"] == shared["z"] == Range(-8, 3)
    assert shared["y"] == spans["y"]
    assert share_sums(from_proto(proto(text)), spans, {"flat"}) == spans


def test_the_integer_form_has_the_integers_of_the_file(tmp_path: Path) -> None:
    artifact = build(tmp_path)
    (tmp_path / "files").mkdir()
    paths = write_integer_form(artifact.model, tmp_path / "files")
    (port,), (result,) = with_integer_ports(read_unchecked(artifact.model))
    assert repr(port.scale) in paths[1].read_text()
    settings = SessionSettings(optimization="none")
    whole, bare = (open_session(path, settings) for path in (artifact.model, tmp_path / "files" / MODEL))
    assert [(v.name, v.type) for v in (*bare.get_inputs(), *bare.get_outputs())] == [
        ("x", "tensor(int8)"),
        ("y", "tensor(int8)"),
    ]
    for sample in np.random.default_rng(3).normal(0, 2, (4, 1, 3, 8, 8)).astype(np.float32):
        integers = np.clip(np.rint(sample / np.float32(port.scale)) + port.zero, -128, 127).astype(np.int8)
        (answer,) = bare.run(None, {"x": integers})
        numbers = (answer.astype(np.float32) - result.zero) * np.float32(result.scale)
        np.testing.assert_array_equal(numbers, whole.run(None, {"x": sample})[0])


def test_an_end_that_is_float_stays_float(tmp_path: Path) -> None:
    artifact = build(tmp_path, exclude=("dense",))
    model = read_unchecked(artifact.model)
    inputs, outputs = with_integer_ports(model)
    assert (len(inputs), len(outputs)) == (1, 0)
    save_model(model, tmp_path / "bare.onnx")
    session = open_session(tmp_path / "bare.onnx", SessionSettings())
    assert session.run(None, {"x": np.zeros((1, 3, 8, 8), np.int8)})[0].dtype == np.float32


def test_a_bundle_has_the_integer_form(tmp_path: Path) -> None:
    model, data = save_net(tmp_path)
    edgeq.package(model, data, tmp_path / "dist", targets="stm32n6", timed=False)
    folder = tmp_path / "dist" / "files" / "stm32n6" / "neural-art"
    assert {path.name for path in folder.iterdir()} == {MODEL, "README.md"}


def test_an_open_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="N"):
        build(tmp_path, NET.replace("float[1,3,8,8] x", "float[N,3,8,8] x").replace("float[1,4] y", "float[N,4] y"))


@pytest.mark.parametrize(("field", "value"), [("activation_type", "uint8"), ("weight_type", "uint8"), ("wide", ("*",))])
def test_a_scheme_that_the_npu_cannot_run_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(UsageError):
        build(tmp_path, **{field: value})


def test_a_newer_opset_is_lowered_only_where_it_means_the_same() -> None:
    model = from_proto(proto("g (float[1,4] x) => (float[1,4] y) { y = Relu(x) }"))
    model.opset_imports[""] = 22
    lower_opset(model, Path("m.onnx"), compiler_opset(), "ST Edge AI")
    assert model.opset_imports[""] == 20
    changed = from_proto(
        proto("g (float[1,4,2] x, float[4] s) => (float[1,4,2] y) { y = GroupNormalization(x, s, s) }")
    )
    changed.opset_imports[""] = 22
    with pytest.raises(ModelError, match="GroupNormalization of opset 22; ST Edge AI ends at 20"):
        lower_opset(changed, Path("m.onnx"), compiler_opset(), "ST Edge AI")
