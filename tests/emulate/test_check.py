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
from edgeq.emulate.check import CheckedModel, EmulatedCheck, check_trial, summarise
from edgeq.emulate.routes import Open, Simulator
from edgeq.errors import BoardError, CheckFailedError, RuntimeUnavailableError
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target, resolve
from edgeq.measure.inference import Session
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
    trial = CheckedModel(model, SessionSettings(), vectors, **{"tolerance": {"y": 0.1}, "name": "v", **options})
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
    assert any("WRONG" in line for line in summarise([found]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda y: y.astype(np.float64), "dtype float64"),
        (lambda y: y[0], r"shape \(4,\)"),
        (lambda y: y * np.nan, "not finite"),
    ],
)
def test_outputs_of_another_form_fail(model: Path, change: Callable[[Any], Any], says: str) -> None:
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

    trial = CheckedModel(
        model, SessionSettings(), [({"x": X[:1]}, {"y": 2 * X[:1]})], float_model=float_model, samples=samples
    )
    simulators = {"systolic": simulating(disturb)}
    found = check_trial(trial, resolve("gemmini", MACHINE), MACHINE, simulators=simulators)
    assert (found.status, found.reference, len(found.answers)) == (status, "float32", 1)
    assert found.host_agreement is not None
    assert 35 < found.host_agreement.sqnr_db < 45
    record = json.loads(json.dumps(plain(found), allow_nan=False))
    assert record["selftest"]["y"]["tolerance"] is None
    assert any("against float32" in line for line in summarise([found]))
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
    trial = CheckedModel(model, SessionSettings())
    found = check_trial(trial, resolve("gemmini", MACHINE), MACHINE)
    assert (found.status, found.reason) == ("not run", "there is no simulator 'systolic' here")
    assert summarise([found]) == ["gemmini: not run", "  there is no simulator 'systolic' here"]


@pytest.fixture
def rounded(tmp_path: Path) -> Path:
    """Write a model that computes 2 x + 0.02, the quantized form of `model`."""
    file = tmp_path / "q.onnx"
    body = "off (float[1, 4] x) => (float[1, 4] y) { d = Add(x, x) y = Add(d, off) }"
    onnx.save(proto(body, {"off": np.float32(0.02)}), file)
    return file


def against_float(change: Callable[[Any], Any], rounded: Path, model: Path, **options: Any) -> EmulatedCheck:
    trial = CheckedModel(rounded, SessionSettings(), float_model=model, **options)
    simulators = {"systolic": simulating(change)}
    return check_trial(trial, resolve("gemmini", MACHINE), MACHINE, simulators=simulators)


def first_only(error: float) -> Callable[[Any], Any]:
    """Return a change that adds `error` to the first sample's output only."""
    return lambda y: y + error if np.allclose(y, 2 * X[:1] + 0.02) else y


def test_a_loss_on_one_sample_is_no_reason_to_refuse(model: Path, rounded: Path, samples: Samples) -> None:
    found = against_float(first_only(0.3), rounded, model, samples=samples)
    assert found.agreement is not None
    assert found.host_agreement is not None
    assert found.agreement.sqnr_db < found.host_agreement.sqnr_db - 3
    assert found.status == "passed"


def test_a_loss_on_all_samples_is_a_reason(model: Path, rounded: Path, samples: Samples) -> None:
    found = against_float(lambda y: y + 0.1, rounded, model, samples=samples)
    assert found.status == "failed"
    with pytest.raises(CheckFailedError, match=r"output 'y' has .* at least .* dB less\)") as caught:
        found.check()
    assert "package it again" not in str(caught.value)


def test_labels_decide_where_they_suffice(model: Path, rounded: Path, tmp_path: Path) -> None:
    many = np.random.default_rng(1).standard_normal((200, 4)).astype(np.float32)
    np.savez(tmp_path / "many.npz", x=many, label=many.argmax(axis=1))
    labelled = open_samples(
        tmp_path / "many.npz", signature_of(onnx.load(model), model), preprocess="key=x,label=label"
    )
    options = {"samples": labelled, "task": make_task("classification")}
    assert against_float(lambda y: y + 0.3, rounded, model, **options).status == "passed"  # no class changes
    lost = against_float(lambda y: y[:, ::-1], rounded, model, **options)
    assert lost.status == "failed"
    assert "against this machine, at least" in lost.reason


@pytest.mark.parametrize(("noise_db", "status"), [(30.0, "failed"), (18.0, "passed"), (None, "passed")])
def test_without_the_float_model_the_variant_s_own_noise_decides(
    noise_db: float | None, status: str, model: Path, samples: Samples
) -> None:
    random = np.random.default_rng(2)
    found = checked(
        simulating(lambda y: y + random.normal(0, 0.2, y.shape).astype(np.float32)),
        model, samples=samples, noise_db=noise_db, tolerance=None,
    )  # fmt: skip
    assert found.status == status
    assert ("its own quantization noise" in "\n".join(summarise([found]))) == (noise_db is not None)
