from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from edgeq_device.engines.session_options import BRIEF_SPIN

from edgeq import demo
from edgeq.errors import RuntimeUnavailableError, UsageError
from edgeq.run.session import Engines, SessionSettings, onnxruntime, open_session
from tests.graphs import proto


def model_of(op_type: str) -> bytes:
    return bytes(proto(f"g (float[2] x) => (float[2] y) {{ y = {op_type}(x) }}").SerializeToString())


def test_bytes_and_files_run_alike(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model_of("Neg"))
    x = np.array([1.0, -2.0], np.float32)
    for source in (path, path.read_bytes()):
        np.testing.assert_array_equal(open_session(source).run(None, {"x": x})[0], -x)


def test_settings_reach_onnxruntime(tmp_path: Path) -> None:
    optimized = tmp_path / "optimized.onnx"
    session = open_session(
        demo.MODEL,
        SessionSettings(
            config={"session.x64quantprecision": "1"},
            intra_op_threads=1,
            optimization="basic",
            save_optimized_to=optimized,
            profile_prefix=tmp_path / "profile",
        ),
    )
    options = session.get_session_options()
    assert options.intra_op_num_threads == 1
    assert options.get_session_config_entry("session.x64quantprecision") == "1"
    assert Path(session.end_profiling()).parent == tmp_path
    kinds = {node.op_type for node in onnx.load(optimized).graph.node}
    assert "BatchNormalization" not in kinds, "the basic level folds it"


def test_threads_sleep_soon_after_a_run_unless_set_otherwise() -> None:
    (key,) = BRIEF_SPIN
    for config, expected in (({}, BRIEF_SPIN[key]), ({key: "50"}, "50")):
        options = open_session(demo.MODEL, SessionSettings(config=config)).get_session_options()
        assert options.get_session_config_entry(key) == expected


def test_a_session_keeps_memory_between_runs_unless_set_otherwise() -> None:
    for settings, expected in ((SessionSettings(), True), (SessionSettings(arena=False), False)):
        assert open_session(demo.MODEL, settings).get_session_options().enable_cpu_mem_arena is expected


def test_no_optimization_means_none(tmp_path: Path) -> None:
    optimized = tmp_path / "optimized.onnx"
    open_session(demo.MODEL, SessionSettings(optimization="none", save_optimized_to=optimized))
    assert "BatchNormalization" in {node.op_type for node in onnx.load(optimized).graph.node}


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "refuses"), (b"this is not a model", "refuses"), (model_of("NoSuchOperator"), "NoSuchOperator")],
    ids=["empty", "text", "unknown operator"],
)
def test_a_refused_model_is_one_line_that_names_it(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(RuntimeUnavailableError, match=words) as caught:
        open_session(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"absent\.onnx"):
        open_session(tmp_path / "absent.onnx")


def test_bytes_are_called_the_model() -> None:
    with pytest.raises(RuntimeUnavailableError, match="refuses the model"):
        open_session(b"this is not a model")


def test_without_onnxruntime_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(RuntimeUnavailableError) as caught:
        onnxruntime()
    assert "pip install onnxruntime (CPU)" in caught.value.fix
    assert "pip install onnxruntime-gpu" in caught.value.fix


@pytest.mark.parametrize("threads", [-1, 100_000])
def test_threads_that_cannot_be(threads: int) -> None:
    with pytest.raises(UsageError, match=f"{threads} threads"):
        open_session(demo.MODEL, SessionSettings(intra_op_threads=threads))


def test_sessions_that_are_opened_apart_run_alike_in_processes_of_their_own(tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", np.array([1.0, -2.0], np.float32)
    path.write_bytes(model_of("Neg"))
    with Engines() as engines:
        first, *others = engines.open_apart(path, SessionSettings(), 3)
        again = engines.open(path, SessionSettings(), 1)
        for session in (first, *others, again):
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], -x)
        assert isinstance(first, onnxruntime().InferenceSession)
        assert len({session.guest.process for session in others}) == 2
        assert again.guest.process == others[0].guest.process
        assert engines.ended() == ()
