"""Test the engine: outputs, times and coverage of the wasm runtime, and what it refuses."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgeq_device.engines.catalog import find_library
from edgeq_device.engines.node_package import FOLDER, load_pins, package_folder
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.measure.latency import Bursts
from edgeq_device.measure.scenarios import make_runner

import edgeq
from edgeq import demo
from edgeq.errors import EngineError
from edgeq.measure.kernel_times import kernel_times
from edgeq.measure.kernels import profile
from edgeq.model.load import read_model
from edgeq.run.session import Engines, SessionSettings, open_session

from .runtime import WASM, need_runtime

SETTINGS = SessionSettings(engine=WASM)


@pytest.fixture
def samples() -> Any:
    with np.load(demo.CALIBRATION) as archive:
        return [{"image": archive["image"][i : i + 1]} for i in range(8)]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """Run one process for all tests in which nothing fails."""
    need_runtime()
    with Engines() as running:
        yield running


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Any:
    need_runtime()
    place = tmp_path_factory.mktemp("quantized") / "int8.onnx"
    return edgeq.quantize(demo.MODEL, demo.CALIBRATION, place, target="web-wasm", timed=False)


def test_float32_is_that_of_onnxruntime(engines: Engines, samples: Any) -> None:
    session = engines.open(demo.MODEL, SETTINGS)
    own = open_session(demo.MODEL)
    assert [(i.name, i.type) for i in session.get_inputs()] == [(i.name, i.type) for i in own.get_inputs()]
    for feed in samples:
        np.testing.assert_allclose(session.run(None, feed)[0], own.run(None, feed)[0], rtol=1e-4, atol=1e-5)


def test_a_quantized_model_is_proven_in_it(quantized: Any) -> None:
    assert quantized.proof.engine == "wasm"
    assert quantized.native
    assert quantized.proof.coverage.measured
    assert quantized.proof.coverage.int8_mac_share == 1.0
    assert quantized.proof.agreement.sqnr_db > 20


def test_coverage_is_what_the_trace_shows(engines: Engines, quantized: Any, samples: Any) -> None:
    source = onnx.load(demo.MODEL).graph.node
    layers = {node.name for node in source if node.op_type in ("Conv", "Gemm", "MatMul")}
    kernels = profile(quantized.output, SETTINGS, samples[0], opener=engines.open).kernels
    integer = {k.name for k in kernels if k.op_type in ("QLinearConv", "QGemm", "QLinearMatMul")}
    integer_nodes = {node.source for node in quantized.proof.coverage.nodes if node.kind == "int8" and node.macs}
    assert len(integer) == len(integer_nodes)
    assert integer_nodes == layers
    assert not [node for node in quantized.proof.coverage.nodes if node.kind == "float" and node.macs]


def test_layers_are_timed(engines: Engines, quantized: Any, samples: Any) -> None:
    times = kernel_times(quantized.output, SETTINGS, samples[0], read_model(demo.MODEL), opener=engines.open)
    assert sum(time.us for time in times if time.kind == "int8") > 0


def test_runs_are_timed_where_they_run(engines: Engines, samples: Any) -> None:
    session = engines.open(demo.MODEL, SETTINGS)
    for options in ({}, {"samples_per_query": 4}, {"samples_per_query": 4, "batch": 2}):
        seconds = make_runner(session, samples, **options).burst(Bursts(0.02, 0.01), slow=False)  # type: ignore[attr-defined]
        assert 0 < sum(seconds.samples) <= seconds.busy_s
    session.close()
    with pytest.raises(EngineError):
        session.run(None, samples[0])


def test_an_input_that_does_not_fit_is_refused_as_here(engines: Engines, samples: Any) -> None:
    with pytest.raises(ValueError, match="image"):
        engines.open(demo.MODEL, SETTINGS).run(None, {"image": samples[0]["image"][0]})


@pytest.mark.parametrize("dtype", ["FLOAT", "DOUBLE", "INT64", "INT32", "UINT8", "INT8", "BOOL"])
def test_numbers_of_every_type_come_back(engines: Engines, dtype: str, tmp_path: Path) -> None:
    kind = onnx.helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, dtype))
    file = tmp_path / "same.onnx"
    kinds = (getattr(onnx.TensorProto, dtype), [2, "N"])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "same",
        [onnx.helper.make_tensor_value_info("x", *kinds)],
        [onnx.helper.make_tensor_value_info("y", *kinds)],
    )
    onnx.save(onnx.helper.make_model(graph, ir_version=9, opset_imports=[onnx.helper.make_opsetid("", 17)]), file)
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(kind)
    (output,) = engines.open(file, SETTINGS).run(None, {"x": values})
    assert output.dtype == kind
    np.testing.assert_array_equal(output, values)


def test_weights_beside_the_model_are_found(engines: Engines, tmp_path: Path, samples: Any) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(onnx.load(demo.MODEL), file, save_as_external_data=True, location="weights.bin", size_threshold=0)
    output = engines.open(file, SETTINGS).run(None, samples[0])[0]
    right = engines.open(demo.MODEL, SETTINGS).run(None, samples[0])[0]
    np.testing.assert_array_equal(output, right)


def test_an_absent_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(RuntimeUnavailableError, match=r"node|npm install --prefix .* onnxruntime-web@"):
        find_library(WASM, "99")


def test_another_version_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_runtime()
    (tmp_path / WASM.module).mkdir()
    (tmp_path / WASM.module / "package.json").write_text('{"version": "1.31.0"}', "utf-8")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(RuntimeUnavailableError, match=r"1\.31\.0 is not 1\.30\.0"):
        find_library(WASM, "99")


@pytest.mark.parametrize("place", range(3))
def test_a_wrong_byte_of_the_runtime_is_refused(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_runtime()
    package = package_folder(WASM)
    (tmp_path / WASM.module / "dist").mkdir(parents=True)
    shutil.copy(package / "package.json", tmp_path / WASM.module)
    for file in load_pins()["runtimes"]["wasm"]:
        shutil.copy(package / file["path"], tmp_path / WASM.module / file["path"])
    wrong = tmp_path / WASM.module / load_pins()["runtimes"]["wasm"][place]["path"]
    content = bytearray(wrong.read_bytes())
    content[-1] ^= 1
    wrong.write_bytes(content)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with Engines() as engines, pytest.raises(EngineError, match=f"{wrong.name} has the SHA-256"):
        engines.open(demo.MODEL, SETTINGS)
