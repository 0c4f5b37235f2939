"""Test the whole way from a float model to a proven .tflite file, and the contents of the file."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import edgeq
from edgeq.backends.base import Artifact, backend_for
from edgeq.backends.litert.convert import lower
from edgeq.backends.litert.network import TfliteNetwork
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.cli import group
from edgeq.data.samples import open_samples
from edgeq.errors import ModelError, RuntimeUnavailableError, UsageError
from edgeq.hardware.target import resolve
from edgeq.model.load import read_unchecked
from edgeq.model.prepare import prepare_model
from edgeq.run.engines import EngineChoice, load_engines
from edgeq.scheme import Scheme
from tests.backends.litert.files import installed, litert
from tests.graphs import proto

micro = pytest.mark.skipif(not installed("tflite_micro"), reason="tflite-micro is not installed")
NET = """g (float[N,3,8,8] x) => (float[N,4] y) {
    [conv] h = Conv<pads=[1,1,1,1]>(x, w, b)
    [gate] s = Sigmoid(h)
    [silu] m = Mul(h, s)
    [depthwise] e = Conv<pads=[1,1,1,1], group=8>(m, d)
    [join] j = Concat<axis=1>(e, m)
    [pool] p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(j)
    [flat] l = Flatten(p)
    [dense] c = Gemm<transB=1>(l, f)
    [soft] y = Softmax<axis=-1>(c)
}"""


def weights() -> dict[str, np.ndarray]:
    """Return random weights for the network."""
    random = np.random.default_rng(0)
    shapes = {"w": (8, 3, 3, 3), "b": (8,), "d": (8, 1, 3, 3), "f": (4, 256), "r": (4, 16)}
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def model_and_data(folder: Path, text: str = NET, **more: np.ndarray) -> tuple[Path, Path]:
    """Write the model and samples for it, and return both paths."""
    onnx.save(proto(text, {**weights(), **more}), folder / "net.onnx")
    samples = np.random.default_rng(1).normal(0, 1, (8, 3, 8, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=samples)
    return folder / "net.onnx", folder / "data.npz"


def network(folder: Path, text: str = NET, **options: Any) -> TfliteNetwork:
    """Build the model and return the operators of its file."""
    model, data = model_and_data(folder, text)
    prepared = prepare_model(model, folder / "prepared")
    samples = open_samples(data, prepared.signature)
    target = resolve("android-xnnpack")
    scheme = target.profile.scheme.replace(**options)
    ranges = derive_ranges(collect(prepared.model, samples, model_digest=prepared.digest), scheme.method)
    artifact = backend_for(target).build(prepared, ranges, scheme, folder / "q.onnx")
    return lower(read_unchecked(artifact.model), model)


@litert
@pytest.mark.parametrize("target", ["android-xnnpack", pytest.param("cortex-m7", marks=micro)])
def test_quantize_writes_a_proven_file(tmp_path: Path, target: str) -> None:
    model, data = model_and_data(tmp_path)
    report = edgeq.quantize(model, data, tmp_path / "net.tflite", target=target, timed=False)
    assert report.output.read_bytes()[4:8] == b"TFL3"
    assert report.proof.engine == ("litert" if target == "android-xnnpack" else "tflite-micro")
    assert report.proof.agreement.sqnr_db > 20
    assert report.proof.coverage.int8_mac_share == 1


@litert
def test_ranges_and_ties_need_no_conversion(tmp_path: Path) -> None:
    kinds = Counter(operator.kind for operator in network(tmp_path).operators)
    assert kinds["QUANTIZE"] == kinds["DEQUANTIZE"] == kinds["TRANSPOSE"] == 0


@litert
def test_a_layer_in_float_stands_between_conversions(tmp_path: Path) -> None:
    tflite = network(tmp_path, exclude=("depthwise",))
    (layer,) = (operator for operator in tflite.operators if operator.node == "depthwise" and "CONV" in operator.kind)
    assert {tensor.type for tensor in (*layer.inputs, *layer.outputs) if tensor} == {"float32"}
    kinds = Counter(operator.kind for operator in tflite.operators)
    assert (kinds["DEQUANTIZE"], kinds["QUANTIZE"]) == (1, 1)


@litert
def test_an_average_over_the_whole_image_has_its_own_range(tmp_path: Path) -> None:
    text = NET.replace("kernel_shape=[2,2], strides=[2,2]", "kernel_shape=[8,8]")
    tflite = network(tmp_path, text.replace("Gemm<transB=1>(l, f)", "Gemm<transB=1>(l, r)"))
    (mean,) = (operator for operator in tflite.operators if operator.node == "pool")
    assert mean.kind == "MEAN"
    assert mean.inputs[0] is not None
    scales = [tensor.scales.scale[0] for tensor in (mean.inputs[0], *mean.outputs) if tensor.scales is not None]
    assert scales[1] < scales[0] / 2


@litert
def test_an_output_of_another_name_is_refused(tmp_path: Path) -> None:
    model, data = model_and_data(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match=r"Name the output net\.tflite"):
        edgeq.quantize(model, data, tmp_path / "out" / "net.onnx", target="android-xnnpack")
    with pytest.raises(UsageError, match=r"Name the output net\.onnx"):
        edgeq.quantize(model, data, tmp_path / "out" / "net.tflite", target="generic-arm64")


@litert
def test_retarget_writes_the_format_of_the_target(tmp_path: Path) -> None:
    model, data = model_and_data(tmp_path)
    source = edgeq.quantize(model, data, tmp_path / "int8.onnx", target="generic-arm64", timed=False).output
    report = edgeq.retarget(source, tmp_path / "net.tflite", target="android-xnnpack")
    assert report.output.read_bytes()[4:8] == b"TFL3"
    assert report.by_default is not None
    assert 0 < report.by_default.largest < 0.1  # XNNPACK rounds some sums differently.
    assert not report.session_options
    assert {path.name for path in tmp_path.iterdir()} == {"net.onnx", "int8.onnx", "net.tflite", "data.npz"}


@litert
def test_retarget_names_what_the_format_cannot_express(tmp_path: Path) -> None:
    text = NET.replace("[gate] s = Sigmoid(h)", "[gate] s = Hardmax(h)")
    model, data = model_and_data(tmp_path, text)
    source = edgeq.quantize(model, data, tmp_path / "int8.onnx", target="generic-arm64", timed=False).output
    with pytest.raises(ModelError, match=r"'gate' \(Hardmax\) cannot be written"):
        edgeq.retarget(source, tmp_path / "net.tflite", target="android-xnnpack")
    assert not (tmp_path / "net.tflite").exists()


@pytest.mark.parametrize(
    ("nodes", "target", "refused"),
    [
        ("[soft] y = Softmax<axis=-1>(c)", "android-xnnpack", {}),
        ("[hard] g = Hardmax(c)\n[soft] y = Mod<fmod=1>(g, c)", "android-xnnpack", {"hard", "soft"}),
        ("[rate] g = Abs(c)\n[sign] h2 = Sign(g)\n[soft] y = Add(h2, c)", "android-xnnpack", {}),
        ("[rate] g = Abs(c)\n[sign] h2 = Sign(g)\n[soft] y = Add(h2, c)", "cortex-m7", {"sign"}),
    ],
)
def test_inspect_forecasts_what_quantize_refuses(tmp_path: Path, nodes: str, target: str, refused: Any) -> None:
    model, data = model_and_data(tmp_path, NET.replace("[soft] y = Softmax<axis=-1>(c)", nodes))
    forecast = edgeq.inspect(model, target).targets[0].refused
    assert forecast.keys() == set(refused)
    if not installed("ai_edge_litert"):
        return
    if not refused:
        assert edgeq.quantize(model, data, tmp_path / "net.tflite", target=target, timed=False)
        return
    with pytest.raises(ModelError) as error:
        edgeq.quantize(model, data, tmp_path / "net.tflite", target=target, timed=False)
    assert any(f"'{name}'" in str(error.value) and reason in str(error.value) for name, reason in forecast.items())


def test_inspect_shows_the_nodes_instead_of_a_forecast(tmp_path: Path) -> None:
    model, _ = model_and_data(tmp_path, NET.replace("[gate] s = Sigmoid(h)", "[gate] s = Hardmax(h)"))
    process = CliRunner().invoke(group, ["inspect", str(model), "-t", "android-xnnpack"])
    assert "android-xnnpack (litert): `edgeq quantize` will refuse the model, for this reason" in process.output
    assert "  refused  Hardmax (gate): edgeq does not write this operator yet" in process.output


def test_inspect_names_a_free_size_and_the_nodes(tmp_path: Path) -> None:
    text = NET.replace("[N,3,8,8]", "[N,3,H,8]").replace("[gate] s = Sigmoid(h)", "[gate] s = Hardmax(h)")
    model, _ = model_and_data(tmp_path, text)
    refused = edgeq.inspect(model, "android-xnnpack", shapes={"x": (1, 3, 8, 8)}).targets[0].refused
    assert refused.keys() == {"", "gate"}
    assert refused[""].startswith("input 'x' has no fixed size on axis 2 (H). Give ⟨fix⟩ H=SIZE")


@litert
def test_an_operator_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    model, data = model_and_data(tmp_path, NET.replace("[gate] s = Sigmoid(h)", "[gate] s = Hardmax(h)"))
    with pytest.raises(ModelError, match=r"'gate' \(Hardmax\) cannot be written"):
        edgeq.quantize(model, data, tmp_path / "net.tflite", target="android-xnnpack", timed=False)


def test_an_absent_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    model, data = model_and_data(tmp_path)
    with pytest.raises(RuntimeUnavailableError, match=r"ai-edge-litert is not installed.*pip install ai-edge"):
        edgeq.quantize(model, data, tmp_path / "net.tflite", target="android-xnnpack", timed=False)
    # tune would otherwise report that no candidate could be built.
    with pytest.raises(RuntimeUnavailableError, match="ai-edge-litert is not installed"):
        edgeq.tune(model, data, tmp_path / "tuned", target="android-xnnpack")


def test_a_file_for_a_microcontroller_stays_in_its_engine(tmp_path: Path) -> None:
    choice = EngineChoice(load_engines()["tflite-micro"])
    artifact = Artifact(tmp_path / "m.onnx", Scheme(), "CPUExecutionProvider", engine=choice)
    assert artifact.in_engine(choice) is artifact
    with pytest.raises(UsageError, match="litert cannot run models built for tflite-micro"):
        artifact.in_engine(EngineChoice(load_engines()["litert"]))
