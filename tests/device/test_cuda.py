"""Test sessions of the CUDA provider, with sessions that run on the CPU under its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from edgeq_device.engines import cuda
from edgeq_device.engines.cuda import CUDA, BoundSession, CapturedSession, OpenWith, open_cuda
from edgeq_device.errors import RuntimeUnavailableError

from tests import graphs

GRAPHS = "enable_cuda_graph"


class Session:
    """Run on the CPU, report CUDA as the provider, and record the graph of each run."""

    def __init__(self, model: Path, providers: list[Any], graphs: list[str], fails: str = "") -> None:
        self.options = providers[0][1]
        self._session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        self._graphs, self._fails, self.runs = graphs, fails, 0

    def get_providers(self) -> list[str]:
        return [CUDA, "CPUExecutionProvider"]

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        graph = options.get_run_config_entry("gpu_graph_id") if options is not None else ""
        self._graphs.append(graph)
        self.runs += 1
        if self._fails and graph != "-1" and GRAPHS in self.options:
            raise RuntimeError(self._fails)
        self._session.run_with_iobinding(binding, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class OnGpu:
    """Open sessions of one model. `graphs` lists the graph of each run; "" for a run that captures or replays one."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.opened, self.graphs, self.fails = model, list[Session](), list[str](), ""
        monkeypatch.setattr(cuda, "_MEMORY", "cpu")

    def open_with(self, providers: list[Any]) -> Session:
        self.opened.append(Session(self.model, providers, self.graphs, self.fails))
        return self.opened[-1]

    def open(self, open_with: OpenWith | None = None) -> BoundSession | CapturedSession:
        ort = SimpleNamespace(__version__="9.9", OrtValue=onnxruntime.OrtValue, RunOptions=onnxruntime.RunOptions)
        return open_cuda(ort, {"use_tf32": "0"}, open_with or self.open_with)


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], OnGpu]:
    def made(text: str) -> OnGpu:
        (tmp_path / "m.onnx").write_bytes(graphs.proto(text).SerializeToString())
        return OnGpu(tmp_path / "m.onnx", monkeypatch)

    return made


def feed(rows: int) -> dict[str, Any]:
    return {"x": np.full((rows, 2), -rows, np.float32)}


def test_the_first_shapes_are_captured_and_others_run_in_a_session_of_their_own(
    on_gpu: Callable[[str], OnGpu],
) -> None:
    gpu = on_gpu("g (float[N,2] x) => (float[N,2] y) { y = Neg (x) }")
    session = gpu.open()
    first = session.run(None, feed(1))[0]
    assert [GRAPHS in s.options for s in gpu.opened] == [False, True]
    for rows in (1, 3, 1, 4, 3):
        np.testing.assert_array_equal(session.run(["y"], feed(rows))[0], np.full((rows, 2), rows))
    assert [s.runs for s in gpu.opened] == [0, 4, 3]  # one of the four runs, without capture, finds the output's memory
    assert gpu.opened[2].options == {"use_tf32": "0"}
    assert gpu.graphs == ["-1", "", "", "", "", "", ""]
    assert first[0, 0] == 1, "the next run has not written into it"
    assert session.get_providers()[0] == CUDA


def test_outputs_of_fixed_size_need_no_run_before_the_first(on_gpu: Callable[[str], OnGpu]) -> None:
    gpu = on_gpu("g (float[1,2] x) => (float[1,2] y) { y = Neg (x) }")
    assert gpu.open().run(None, feed(1))[0][0, 0] == 1
    assert gpu.graphs == [""]


def test_outputs_of_open_and_of_fixed_size_keep_their_names(on_gpu: Callable[[str], OnGpu]) -> None:
    outputs, nodes = "float[N,2] y, float[2] s, float[N,2] z", "y = Neg (x) s = ReduceSum <keepdims = 0> (x, zero)"
    gpu = on_gpu(f"g (float[N,2] x) => ({outputs}) <int64[1] zero = {{0}}> {{ {nodes} z = Abs (x) }}")
    session = gpu.open()
    for rows in (2, 3, 2):
        y, s, z = session.run(None, feed(rows))
        assert (y[0, 0], s[0], z[0, 0]) == (rows, -rows * rows, rows)
        assert (y.shape, s.shape) == ((rows, 2), (2,))


def test_sizes_that_depend_on_values_are_not_captured(on_gpu: Callable[[str], OnGpu]) -> None:
    gpu = on_gpu("g (float[N,2] x) => (int64[D,K] y) { y = NonZero (x) }")
    session = gpu.open()
    assert len(gpu.opened) == 1
    assert session.run(None, {"x": np.array([[0, 1]], np.float32)})[0].shape == (2, 1)
    assert session.run(None, {"x": np.array([[2, 1]], np.float32)})[0].shape == (2, 2)
    assert gpu.graphs == ["", ""]


def test_a_free_size_without_a_name_may_depend_on_values(on_gpu: Callable[[str], OnGpu]) -> None:
    gpu = on_gpu("g (float[N,2] x) => (int64[D,K] y) { y = NonZero (x) }")
    model = onnx.load(gpu.model)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = "?"
    onnx.save(model, gpu.model)
    gpu.open()
    assert [GRAPHS in s.options for s in gpu.opened] == [False]


def test_inputs_that_do_not_fit_are_no_fault_of_the_graph(on_gpu: Callable[[str], OnGpu]) -> None:
    gpu = on_gpu("g (float[N,2] x) => (float[N,2] y) { y = Neg (x) }")
    session = gpu.open()
    with pytest.raises(Exception, match="Got: 3 Expected: 2"):
        session.run(None, {"x": np.zeros((1, 3), np.float32)})
    assert session.run(None, feed(2))[0].shape == (2, 2)
    assert session.notes == ()
    assert gpu.opened[1].runs == 3


def test_a_model_that_no_graph_holds_goes_on_without(on_gpu: Callable[[str], OnGpu]) -> None:
    gpu = on_gpu("g (float[N,2] x) => (float[N,2] y) { y = Neg (x) }")
    gpu.fails = "operation not permitted\nwhen stream is capturing"
    session = gpu.open()
    for rows in (2, 2, 5):
        np.testing.assert_array_equal(session.run(None, feed(rows))[0], np.full((rows, 2), rows))
    assert [s.runs for s in gpu.opened] == [0, 2, 3]
    assert [GRAPHS in s.options for s in gpu.opened] == [False, True, False]
    assert session.notes == (
        "this model cannot be captured as a CUDA graph: operation not permitted when stream is capturing",
    )


def test_an_error_after_the_first_run_is_an_error(on_gpu: Callable[[str], OnGpu]) -> None:
    gpu = on_gpu("g (float[N,2] x) => (float[N,2] y) { y = Neg (x) }")
    session = gpu.open()
    session.run(None, feed(2))
    gpu.opened[-1]._fails = "an illegal memory access"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        session.run(None, feed(2))


def test_a_provider_that_refuses_graphs_is_used_without(on_gpu: Callable[[str], OnGpu]) -> None:
    gpu = on_gpu("g (float[N,2] x) => (float[N,2] y) { y = Neg (x) }")

    def open_with(providers: list[Any]) -> Session:
        if GRAPHS in providers[0][1]:
            raise ValueError("nodes are on the CPU, too")
        return gpu.open_with(providers)

    assert gpu.open(open_with).run(None, feed(4))[0].shape == (4, 2)
    assert [s.runs for s in gpu.opened] == [1]


def test_a_provider_that_does_not_start_is_an_error(on_gpu: Callable[[str], OnGpu]) -> None:
    gpu = on_gpu("g (float[N,2] x) => (float[N,2] y) { y = Neg (x) }")

    def open_with(providers: list[Any]) -> Any:
        return onnxruntime.InferenceSession(str(gpu.model), providers=["CPUExecutionProvider"])

    with pytest.raises(
        RuntimeUnavailableError, match=r"onnxruntime 9\.9 lists CUDAExecutionProvider, but cannot start"
    ):
        gpu.open(open_with)
