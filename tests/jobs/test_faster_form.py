"""Test what `quantize` says and does if another form of the model is faster: on made-up timings, and with the engines
that are installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from edgeq_device.measure.claim import Claim
from edgeq_device.measure.latency import Distribution

from edgeq.cli import group
from edgeq.data.open_source import Data
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.engines import EngineState
from edgeq.hardware.target import resolve
from edgeq.jobs import faster_form
from edgeq.jobs.quantize import Quantized, quantize
from edgeq.prove.proof import FLOAT, INT8
from edgeq.run.engines import EngineChoice, load_engines
from edgeq.util.records import plain
from tests.jobs.test_repair import uneven, weights

__all__ = ["uneven", "weights"]
OWN = EngineChoice(load_engines()["onnxruntime"])
"""An engine that is installed everywhere, in place of a plug-in."""
FIND = faster_form.find_unquantized


def steady(ms: float) -> Distribution:
    return Distribution(np.full(24, ms))


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return a table of milliseconds by form. A race of `faster_form` takes them as its result."""
    times: dict[str, float] = {}

    def raced(engines: Any, files: Mapping[str, Any], *rest: Any) -> dict[str, Distribution]:
        del engines, rest
        return {name: steady(times[name]) for name in files}

    monkeypatch.setattr(faster_form, "race_files", raced)
    monkeypatch.setattr(faster_form, "find_unquantized", lambda *place: None)
    monkeypatch.setattr(faster_form, "advise_engine", lambda *place: "")
    return times


def timed(**options: Any) -> Quantized:
    labelled = {"val": Data("val.npz", "key=x,label=label"), "task": "classification"}
    given: dict[str, Any] = {"emulate": False, "overrides": {"per_channel": False}, "force": True, **labelled}
    return quantize("net.onnx", "calib.npz", "out.onnx", **{**given, **options})


@pytest.mark.usefixtures("uneven")
def test_a_repair_slower_than_float32_is_said_in_the_first_line(race: dict[str, float]) -> None:
    race.update({FLOAT: 10.0, INT8: 12.5, "plain": 8.0})
    arguments = ["quantize", "net.onnx", "--data", "calib.npz", "--no-per-channel", "-o", "slow.onnx", "--no-emulate"]
    printed = CliRunner().invoke(group, arguments)
    assert printed.exit_code == 0, printed.output
    first = printed.stdout.splitlines()[0]
    assert first.startswith("faster: int8 is SLOWER than float32: 0.80 times its speed (0.80 to 0.80; 10 → 12.5 ms)")
    assert "`edgeq tune net.onnx --data calib.npz --output BUNDLE`" in " ".join(printed.stdout.split())
    assert printed.output.count("SLOWER") == 1


@pytest.mark.usefixtures("uneven")
@pytest.mark.parametrize(("ms", "best"), [(9.0, False), (5.0, True)])
def test_the_float_model_in_another_engine_is_named_if_it_is_faster(
    race: dict[str, float], monkeypatch: pytest.MonkeyPatch, ms: float, *, best: bool
) -> None:
    monkeypatch.setattr(faster_form, "find_unquantized", lambda *place: OWN)
    race.update({FLOAT: 10.0, INT8: 8.0, "plain": 4.0, OWN.name: ms})
    speed = timed().proof.speed
    assert speed is not None
    assert speed.ratio.estimate == pytest.approx(1.25)
    record = plain(speed)["alternative"]
    assert (record is not None) == best
    if best:
        assert record["ratio"]["estimate"] == pytest.approx(2.0)
        assert (record["loss"], record["samples"]) == (0.0, 16)
        assert record["command"] == "edgeq tune net.onnx --data calib.npz --output BUNDLE --engine onnxruntime"
        assert "1.60 times int8's speed" in record["sentence"]


@pytest.mark.usefixtures("uneven")
def test_an_engine_that_loses_more_than_is_allowed_is_not_named(
    race: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faster_form, "find_unquantized", lambda *place: OWN)
    opened = faster_form._open_rival

    def lossy(*arguments: Any) -> Any:
        rival = opened(*arguments)
        assert rival is not None
        return replace(rival, loss=0.5)

    monkeypatch.setattr(faster_form, "_open_rival", lossy)
    race.update({FLOAT: 10.0, INT8: 8.0, "plain": 4.0, OWN.name: 1.0})
    speed = timed().proof.speed
    assert speed is not None
    assert speed.alternative is None


@pytest.mark.usefixtures("uneven")
@pytest.mark.parametrize("plain_ms", [4.0, 8.0])
def test_a_plain_build_that_labels_allow_wins_if_it_is_faster(
    race: dict[str, float], monkeypatch: pytest.MonkeyPatch, plain_ms: float
) -> None:
    """A repair lowers the loss to expect on other samples. Labels may allow the loss on these samples all the same."""
    race.update({FLOAT: 10.0, INT8: 8.0, "plain": plain_ms})
    original = timed(effort=None)
    content = original.output.read_bytes()
    monkeypatch.setattr(faster_form, "_is_allowed_by_labels", lambda *place: True)
    result = timed()
    wins = plain_ms < 8.0
    assert (result.output.read_bytes() == content) == wins
    assert (result.proof.repair is None) == wins
    assert (result.proof.agreement.sqnr_db == original.proof.agreement.sqnr_db) == wins
    assert result.proof.speed is not None
    assert result.proof.speed.ratio.ms == (plain_ms if wins else 8.0)


@pytest.mark.usefixtures("uneven")
@pytest.mark.parametrize("options", [{"timed": False}, {"target": "raspberry-pi-5"}])
def test_nothing_is_timed_or_claimed_for_another_machine(race: dict[str, float], options: dict[str, Any]) -> None:
    del race  # without times, a race would fail
    proof = timed(**options).proof
    assert proof.repair is not None
    assert proof.speed is None


@pytest.mark.usefixtures("uneven")
def test_a_slow_plain_build_names_float32(race: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Claim(0.9, 0.85, 0.95, 0.95, 24, 1.0, 1.1)
    monkeypatch.setattr("edgeq.prove.proof.make_claim", lambda baseline, model: slow)
    monkeypatch.setattr(faster_form, "advise_engine", lambda *place: "install something")
    del race  # without another engine, nothing more is timed
    speed = timed(effort=None).proof.speed
    assert speed is not None
    assert speed.alternative is not None
    assert (speed.alternative.name, speed.advice) == (FLOAT, "install something")


def states(*engines: tuple[str, str, tuple[str, ...]]) -> Any:
    """Return a replacement for `detect_engines`: engines with their version and their fast precisions."""
    made = [
        EngineState(n, n, version, "", low, (), "" if version else f"pip install {n}") for n, version, low in engines
    ]
    return lambda *arguments: made


@pytest.mark.parametrize(
    ("engines", "chosen", "advised"),
    [
        ([("onnxruntime", "1.32", ("f32",))], None, ""),
        ([("openvino", "2026.4", ("f32", "bf16"))], "openvino:bf16", ""),
        ([("openvino", "2026.4", ("f32",))], "openvino", ""),
        ([("openvino", "", ("f32", "bf16"))], None, "pip install openvino"),
        ([("openvino", "", ("f32",))], None, ""),
        ([("cuda", "13", ("f32", "tf32"))], None, ""),
        ([("litert", "2.3", ("f32",)), ("openvino", "2026.4", ("f32", "bf16"))], "openvino:bf16", ""),
    ],
)
def test_data_decide_which_engine_is_tried(
    monkeypatch: pytest.MonkeyPatch, engines: list[Any], chosen: str | None, advised: str
) -> None:
    machine = detect_machine()
    target = replace(resolve("auto", machine), architecture="x86_64")
    monkeypatch.setattr(faster_form, "detect_engines", states(*engines))
    choice = faster_form.find_unquantized(target, machine)
    assert (choice.name if choice is not None else None) == chosen
    assert faster_form.advise_engine(target, machine).endswith(advised)
    assert bool(faster_form.advise_engine(target, machine)) == bool(advised)


@pytest.mark.usefixtures("uneven")
def test_an_installed_engine_runs_the_float_model(race: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = detect_machine()
    monkeypatch.setattr(faster_form, "find_unquantized", FIND)
    choice = FIND(resolve("auto", machine), machine)
    if choice is None:
        pytest.skip("no other engine for this CPU is installed")
    race.update({FLOAT: 10.0, INT8: 8.0, "plain": 4.0, choice.name: 2.0})
    speed = timed().proof.speed
    assert speed is not None
    assert speed.alternative is not None
    assert speed.alternative.loss <= 0.01
    assert speed.alternative.command.endswith(f"⟨engine⟩ {choice.name}")
