"""Test that random operators have the same numbers in each session that measures, and still draw where asked."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq.run.draws import write_fixed_draws
from edgeq.run.session import PythonCommand, SessionSettings, build_guest_environment, open_session, start_guest
from tests.graphs import proto

X = np.full((2, 3), 0.5, np.float32)
_TRAINING = "float ratio = {0.5}, bool training = {1}"
BODIES = {
    "normal": "y = RandomNormalLike <mean = 5.0, scale = 3.0> (x)",
    "seeded": "y = RandomNormalLike <seed = 1.0> (x)",
    "uniform": "y = RandomUniformLike (x)",
    "of a shape": "r = RandomNormal <shape = [2, 3]> () y = Add (r, x)",
    "scalar": "r = RandomUniform <shape: ints = []> () y = Add (r, x)",
    "bernoulli": "y = Bernoulli (x)",
    "multinomial": "r = Multinomial <sample_size = 3> (x) y = Cast <to = 1> (r)",
    "dropout": "y = Dropout (x, ratio, training)",
    "in double": "d = Cast <to = 11> (x) r = RandomNormalLike (d) s = Add (r, d) y = Cast <to = 1> (s)",
    "in a body": """y = If (training) <then_branch = a () => (float[2, 3] z) { z = RandomNormalLike (x) },
                                      else_branch = b () => (float[2, 3] z) { z = Identity (x) }>""",
}


def model(body: str, *, opset: int = 17) -> onnx.ModelProto:
    return proto(f"g (float[2, 3] x) => (float[2, 3] y) <{_TRAINING}> {{ {body} }}", opset=opset)


def run(made: onnx.ModelProto, settings: SessionSettings | None = None) -> np.ndarray:
    session = open_session(made.SerializeToString(), settings)
    assert [value.name for value in session.get_inputs()] == ["x"]
    return np.stack([session.run(None, {"x": X})[0] for _ in range(2)])


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("body", BODIES)
def test_sessions_have_the_same_numbers(body: str, opset: int) -> None:
    if body == "bernoulli" and opset < 15:
        pytest.skip("Bernoulli came with opset 15")
    made = model(BODIES[body], opset=opset)
    first, again = run(made)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, run(made, SessionSettings(optimization="none"))[0])


def test_a_session_that_draws_has_other_numbers() -> None:
    first, again = run(model(BODIES["seeded"]), SessionSettings(draws=True))
    assert (first != again).all()


def test_numbers_have_the_distribution_of_the_operator() -> None:
    """The mean of 40 000 numbers, and the share of those that a Bernoulli or a Dropout keeps, are those of ONNX."""

    def values(body: str) -> np.ndarray:
        made = proto(f"g (float[200, 200] x) => (float[200, 200] y) <{_TRAINING}> {{ {body} }}")
        session = open_session(made.SerializeToString())
        return np.asarray(session.run(None, {"x": np.full((200, 200), 0.25, np.float32)})[0])

    normal = values(BODIES["normal"])
    assert (normal.mean(), normal.std()) == (pytest.approx(5, abs=0.05), pytest.approx(3, abs=0.05))
    uniform = values("y = RandomUniformLike <low = -4.0, high = -3.0> (x)")
    assert -4 <= uniform.min() < -3.99
    assert -3.01 < uniform.max() <= -3
    assert values(BODIES["bernoulli"]).mean() == pytest.approx(0.25, abs=0.01)
    assert set(np.unique(values(BODIES["dropout"]))) == {0.0, 0.5}
    assert (values(BODIES["dropout"]) == 0).mean() == pytest.approx(0.5, abs=0.01)


def test_classes_are_drawn_by_their_probabilities() -> None:
    made = proto("g (float[1, 3] x) => (int32[1, 9000] y) { y = Multinomial <sample_size = 9000> (x) }")
    scores = np.log(np.array([[0.2, 0.5, 0.3]], np.float32))
    classes = open_session(made.SerializeToString()).run(None, {"x": scores})[0]
    np.testing.assert_allclose(np.bincount(classes[0], minlength=3) / 9000, [0.2, 0.5, 0.3], atol=0.02)


def test_operators_have_different_numbers_unless_their_seed_is_the_same() -> None:
    body = "r = RandomNormalLike{} (x) s = RandomNormalLike{} (x) y = Sub (r, s)"
    assert (run(model(body.format("", "")))[0] != 0).all()
    seeded = model(body.format(*[" <seed = 1.0>"] * 2))
    assert not run(seeded).any()
    assert not run(seeded, SessionSettings(draws=True)).any()


def test_a_name_keeps_its_numbers_when_the_model_changes() -> None:
    """Nodes in front, a renamed output and another opset do not change the numbers of a node."""
    first = model("[noise] r = RandomNormalLike (x) y = Add (r, x)")
    other = model("a = Identity (x) b = RandomNormalLike (a) [noise] c = RandomNormalLike (a) y = Add (c, x)", opset=21)
    np.testing.assert_array_equal(run(first)[0], run(other)[0])


def test_dropout_outside_training_passes_its_input() -> None:
    made = model("y = Dropout (x, ratio, off)")
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array(False), "off"))
    np.testing.assert_array_equal(run(made)[0], X)


def test_a_function_that_draws_has_the_same_numbers() -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "own": 1]>
        g (float[2, 3] x) => (float[2, 3] y) { y = own.noisy (x) }
        <domain: "own", opset_import: ["": 17]> noisy (a) => (b) { r = RandomNormalLike (a) b = Add (a, r) }"""
    first, again = run(onnx.parser.parse_model(text))
    np.testing.assert_array_equal(first, again)
    assert (first != X).all()


def test_a_file_with_external_data_has_the_same_numbers_here_and_in_another_process(tmp_path: Path) -> None:
    made = model("r = RandomNormalLike (x) s = Add (r, w) y = Add (s, x)")
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    made.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    file = tmp_path / "m.onnx"
    onnx.save(made, file, save_as_external_data=True, location="m.data", size_threshold=0)
    here = open_session(file).run(None, {"x": X})[0]
    command = PythonCommand((sys.executable,), (), build_guest_environment(os.environ))
    with start_guest(command, "a guest") as guest:
        np.testing.assert_array_equal(guest.open(file, SessionSettings()).run(None, {"x": X})[0], here)
        drawing = guest.open(file, SessionSettings(draws=True))
        assert (drawing.run(None, {"x": X})[0] != here).all()


def test_a_copy_never_contains_data_from_outside_the_folder_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(24))
    made = model("r = RandomNormalLike (x) s = Add (r, w) y = Add (s, x)")
    outside = made.graph.initializer.add(name="w", data_type=1, dims=[2, 3], data_location=1)
    outside.external_data.add(key="location", value="../secret")
    file = tmp_path / "model" / "m.onnx"
    file.parent.mkdir()
    file.write_bytes(made.SerializeToString())
    folder = tmp_path / "copies" / "here"
    folder.mkdir(parents=True)
    copy = write_fixed_draws(file, folder)
    assert copy.parent == folder
    assert list((tmp_path / "copies").iterdir()) == [folder]
    assert list(folder.iterdir()) == [copy]
