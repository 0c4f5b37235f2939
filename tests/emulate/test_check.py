"""Test checks with simulators that are right, wrong, or refuse. They replace an emulated machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.data.samples import Samples, open_samples
from edgeq.emulate.check import EmulatedCheck, Trial, check_trial, summary
from edgeq.emulate.routes import Open, Simulator
from edgeq.errors import BoardError, CheckFailedError, RuntimeUnavailableError
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target, resolve
from edgeq.measure.agreement import Session
from edgeq.measure.task import make_task
from edgeq.model.load import signature_of
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.records import plain
from tests.graphs import proto

MACHINE = Machine("x86_64", frozenset({"sse4_1"}))
X = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model that computes y = 2 x."""
    file = tmp_path / "m.onnx"
    onnx.save(proto("double (float[1, 4] x) => (float[1, 4] y) { y = Add(x, x) }"), file)
    return file


@pytest.fixture
def samples(model: Path, tmp_path: Path) -> Samples:
    np.savez(tmp_path / "data.npz", x=X, label=X.argmax(axis=1))
    signature = signature_of(onnx.load(model), model)
    return open_samples(tmp_path / "data.npz", signature, preprocess="key=x,label=label")


@dataclass(frozen=True)
class Changed:
    """Wrap a session and change its outputs."""

    session: Session
    change: Callable[[Any], Any]

    def get_outputs(self) -> Sequence[Any]:
        return self.session.get_outputs()

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        return [self.change(value) for value in self.session.run(output_names, input_feed)]


def simulating(change: Callable[[Any], Any]) -> Simulator:
    @contextmanager
    def simulator(target: Target) -> Iterator[Open]:
        yield lambda model, settings: Changed(open_session(model, settings), change)

    return simulator


def checked(simulator: Simulator, model: Path, **options: Any) -> EmulatedCheck:
    vectors = [({"x": X[:1]}, {"y": 2 * X[:1]}), ({"x": X[1:2]}, {"y": 2 * X[1:2]})]
    trial = Trial(model, SessionSettings(), vectors, {"y": 0.1}, name="v", **options)
    return check_trial(trial, resolve("gemmini", MACHINE), MACHINE, simulators={"systolic": simulator})


def test_right_answers_pass(model: Path, samples: Samples) -> None:
    found = checked(simulating(lambda y: y), model, samples=samples, count=15, task=make_task("classification"))
    assert (found.status, found.where, found.how) == ("passed", "modelled", "the systolic simulator")
    assert (found.samples, found.drop) == (15, 0)
    assert found.agreement is not None
    assert found.agreement.sqnr_db == float("inf")
    found.check(0.0)
    record = plain(found)
    assert set(record["accuracy"]) == {"host", "target"}
    assert record["selftest"]["y"]["passed"]


def test_wrong_answers_fail_the_self_test(model: Path, samples: Samples) -> None:
    found = checked(simulating(lambda y: y + 0.5), model, samples=samples)
    assert (found.status, found.samples) == ("failed", 0)
    assert "self-test: output y: error 0.5 is over 0.1" in found.reason
    with pytest.raises(CheckFailedError, match=r"variant v fails on gemmini"):
        found.check()
    assert any("WRONG" in line for line in summary([found]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda y: y.astype(np.float64), "dtype float64"),
        (lambda y: y[0], r"shape \(4,\)"),
        (lambda y: y * np.nan, "not finite"),
    ],
)
def test_what_is_no_such_output_fails(model: Path, change: Callable[[Any], Any], says: str) -> None:
    found = checked(simulating(change), model)
    with pytest.raises(CheckFailedError, match=says):
        found.check()
    assert plain(found)["selftest"]["y"]["max_abs_error"] is None


def test_accuracy_lost_on_the_target_is_reported(model: Path, samples: Samples) -> None:
    def turn(y: Any) -> Any:
        return y if np.allclose(y, 2 * X[:1]) or np.allclose(y, 2 * X[1:2]) else y[:, ::-1]

    found = checked(simulating(turn), model, samples=samples, task=make_task("classification"))
    assert found.status == "passed"
    assert found.drop is not None
    assert found.drop > 0.5
    found.check()
    with pytest.raises(CheckFailedError, match=r"loses .* on gemmini's kernels, more than 0.50"):
        found.check(0.005)


@pytest.mark.parametrize(("noise", "status"), [(0.0, "passed"), (0.02, "passed"), (1.0, "failed")])
def test_without_a_tolerance_float32_is_the_judge(model: Path, samples: Samples, noise: float, status: str) -> None:
    """This machine follows the float model to about 40 dB. So must the target, however its outputs differ from this
    machine's.
    """
    random = np.random.default_rng(1)
    float_model = model.with_name("float.onnx")
    scaled(model, float_model, 1.01)

    def disturb(y: Any) -> Any:
        return (y + noise * random.standard_normal(y.shape)).astype(np.float32)

    trial = Trial(
        model, SessionSettings(), [({"x": X[:1]}, {"y": 2 * X[:1]})], float_model=float_model, samples=samples
    )
    simulators = {"systolic": simulating(disturb)}
    found = check_trial(trial, resolve("gemmini", MACHINE), MACHINE, simulators=simulators)
    assert (found.status, found.reference, len(found.answers)) == (status, "float32", 1)
    assert found.host_agreement is not None
    assert 35 < found.host_agreement.sqnr_db < 45
    record = json.loads(json.dumps(plain(found), allow_nan=False))
    assert record["selftest"]["y"]["tolerance"] is None
    assert any("against float32" in line for line in summary([found]))
    if status == "failed":
        assert "dB SQNR against float32" in found.reason


def scaled(model: Path, place: Path, factor: float) -> None:
    body = f"scaled (float[1, 4] x) => (float[1, 4] y) <float f = {{{factor}}}> {{ z = Add(x, x) y = Mul(z, f) }}"
    onnx.save(proto(body), place)


def test_a_runtime_that_refuses_the_model_fails_it(model: Path) -> None:
    @contextmanager
    def refusing(target: Target) -> Iterator[Open]:
        def opener(model: Path, settings: SessionSettings) -> Session:
            raise RuntimeUnavailableError("its runtime knows no Add")

        yield opener

    found = checked(refusing, model)
    assert (found.status, found.reason) == ("failed", "its runtime knows no Add")


@pytest.mark.parametrize("at_start", [True, False])
def test_a_cut_link_says_nothing_of_the_model(model: Path, at_start: bool) -> None:
    @contextmanager
    def gone(target: Target) -> Iterator[Open]:
        def opener(model: Path, settings: SessionSettings) -> Session:
            raise BoardError("the link was cut")

        if at_start:
            raise BoardError("the link was cut")
        yield opener

    with pytest.raises(BoardError, match="the link was cut"):
        checked(gone, model)


def test_kernels_that_are_not_proven_are_not_believed(model: Path) -> None:
    def unproven(target: Target) -> AbstractContextManager[Open]:
        raise CheckFailedError("it runs other kernels")

    found = checked(unproven, model)
    assert (found.status, found.where, found.reason) == ("not run", "not run", "it runs other kernels")
    found.check()


def test_nothing_at_hand_is_not_run(model: Path) -> None:
    trial = Trial(model, SessionSettings())
    found = check_trial(trial, resolve("gemmini", MACHINE), MACHINE)
    assert (found.status, found.reason) == ("not run", "there is no simulator 'systolic' here")
    assert summary([found]) == ["gemmini: not run", "  there is no simulator 'systolic' here"]
