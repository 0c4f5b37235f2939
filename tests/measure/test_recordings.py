"""Test that recordings become the inputs of single runs, with the states of the float model."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from edgeq.data.open_source import Data
from edgeq.errors import DataError
from edgeq.measure.find_head import HeadChoice
from edgeq.measure.recordings import cut_recordings
from edgeq.signature import Signature, TensorSpec

VOICE = HeadChoice("voice", {"context": 2})


@pytest.fixture
def model() -> Any:
    """Return a model that gives the loudness of a window, and counts its runs in its state."""
    nodes = [
        helper.make_node("ReduceL2", ["wave"], ["loud"], axes=[1]),
        helper.make_node("Sigmoid", ["loud"], ["y"]),
        helper.make_node("Cast", ["sr"], ["rate"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["rate", "rate"], ["one"]),
        helper.make_node("Add", ["state", "one"], ["stateN"]),
    ]
    graph = helper.make_graph(
        nodes,
        "voice",
        [
            helper.make_tensor_value_info("wave", TensorProto.FLOAT, [1, 12]),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [2, 1, 3]),
            helper.make_tensor_value_info("sr", TensorProto.INT64, []),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1]),
            helper.make_tensor_value_info("stateN", TensorProto.FLOAT, [2, 1, 3]),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(made)
    return ort.InferenceSession(made.SerializeToString())


SIGNATURE = Signature(
    (
        TensorSpec("wave", np.dtype("float32"), (1, 12)),
        TensorSpec("state", np.dtype("float32"), (2, 1, 3)),
        TensorSpec("sr", np.dtype("int64"), ()),
    ),
    (),
)


@pytest.mark.parametrize("kind", ["wav", "npz"])
def test_recordings_become_windows_with_states(model: Any, tmp_path: Path, kind: str) -> None:
    pcm = np.arange(-70, 65, dtype="<i2")
    folder = tmp_path / "speech"
    folder.mkdir()
    if kind == "wav":
        with wave.open(str(folder / "a.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(pcm.tobytes())
    else:
        np.savez(folder / "a.npz", pcm=pcm)
    data = cut_recordings(Data(folder, role="validation"), lambda: model, SIGNATURE, VOICE, tmp_path)
    with np.load(data.source) as arrays:
        assert arrays["wave"].shape == (14, 1, 12)
        np.testing.assert_array_equal(arrays["state"][:, 0, 0, 0], np.arange(14))
        assert set(arrays["sr"]) == {16000}
        np.testing.assert_allclose(arrays["wave"][3, 0], pcm[28:40] / 32768)
    few = cut_recordings(Data(folder, count=4), lambda: model, SIGNATURE, VOICE, tmp_path)
    with np.load(few.source) as arrays:
        np.testing.assert_array_equal(arrays["state"][:, 0, 0, 0], [0, 3, 7, 10])


def test_other_data_stay_as_they_are(model: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "runs.npz", wave=np.zeros((3, 1, 12), np.float32), state=np.zeros((3, 2, 1, 3), np.float32))
    data = Data(tmp_path / "runs.npz")
    assert cut_recordings(data, lambda: model, SIGNATURE, VOICE, tmp_path) is data
    assert cut_recordings(data, lambda: pytest.fail("opened"), SIGNATURE, None, tmp_path) is data
    np.save(tmp_path / "speech.npy", np.zeros(99, np.int16))
    with pytest.raises(DataError, match="holds files that are not recordings"):
        cut_recordings(Data(tmp_path), lambda: model, SIGNATURE, VOICE, tmp_path)


def test_a_recording_of_another_rate_is_refused(model: Any, tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 44100, 0, "NONE", ""))
        file.writeframes(bytes(400))
    with pytest.raises(DataError, match="44100 samples a second, the model takes 16000"):
        cut_recordings(Data(tmp_path), lambda: model, SIGNATURE, VOICE, tmp_path)
