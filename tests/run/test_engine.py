"""Test plug-in engines in processes of their own: from a description to a run, and every failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edgeq_device.engines.catalog import form_for, problem_of, serving, this_platform
from edgeq_device.measure.latency import measure_interleaved
from edgeq_device.measure.scenarios import query_runner

from edgeq import demo
from edgeq.errors import EngineError, RuntimeUnavailableError, UsageError
from edgeq.measure.bench import bench
from edgeq.measure.coverage import EngineLayer, layers_of
from edgeq.run.engines import EngineChoice, load_engines
from edgeq.run.session import Engines, SessionSettings, open_session, start_engine
from tests import fake_engine
from tests.plugins import needs_plugin

FEED = {"image": np.random.default_rng(0).random((1, 1, 16, 16)).astype(np.float32)}


def test_a_described_engine_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine.install(tmp_path, monkeypatch)
    settings = SessionSettings(engine=engine, precision="bf16", intra_op_threads=3)
    with Engines() as engines:
        session = engines.open(demo.MODEL, settings)
        assert json.loads((tmp_path / "options.json").read_text()) == {
            "config": '{"CPU":{"HINT":"brain","THREADS":"3"}}',
            "streams": "1",
        }
        assert session.get_providers()[0] == "FakeExecutionProvider"
        np.testing.assert_array_equal(session.run(None, FEED)[0], open_session(demo.MODEL).run(None, FEED)[0])
        other = engines.open(demo.MODEL, SessionSettings(engine=engine))
        assert other.guest is session.guest
        runners = {"there": query_runner(session, [FEED]), "here": query_runner(open_session(demo.MODEL), [FEED])}
        measured = measure_interleaved(runners, min_duration_s=0.02, min_runs=20)
        assert all(found.count >= 20 and found.p50 > 0 for found in measured.values())


@pytest.mark.parametrize(
    ("behaviour", "line"),
    [
        ("crashes at load", r"the process of fake ended: signal SIGSEGV"),
        (
            "does not load",
            r"cannot load .*libfake.so: .*undefined symbol: fake\. Update it: python -m pip",
        ),
        ("no device", r"fake finds no CPU that it can use here. Install the driver of the fake"),
        ("does not start", r"does not start FakeExecutionProvider here"),
        ("crashes at run", r"the process of fake ended: signal SIGSEGV"),
        ("hangs", r"the process of fake does not answer within 2 s"),
    ],
)
def test_failures_in_the_process_are_one_line(
    behaviour: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine.install(tmp_path, monkeypatch, behaviour)
    with (
        start_engine(engine, answer_s=2 if behaviour == "hangs" else 60) as guest,
        pytest.raises(EngineError, match=line) as caught,
    ):
        guest.open(demo.MODEL, SessionSettings(engine=engine)).run(None, FEED)
    assert caught.value.exit_code == 8
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("", r"needs the package edgeq-fake-engine, .*\. Install it: python -m pip install .*'edgeq-fake-engine>=1.2'"),
        ("1.1.9", r"edgeq-fake-engine 1.1.9 is older than 1.2"),
    ],
)
def test_nothing_is_started_for_an_engine_that_cannot_be_used(
    version: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine.install(tmp_path, monkeypatch, version=version)
    monkeypatch.setattr("edgeq.run.session.start_guest", None)
    with Engines() as engines, pytest.raises(RuntimeUnavailableError, match=line):
        engines.open(demo.MODEL, SessionSettings(engine=engine))


def test_nothing_is_started_on_a_cpu_that_an_engine_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = replace(
        fake_engine.install(tmp_path, monkeypatch), cpu_vendors=("GenuineIntel",), cpu_vendors_until="1.2.3"
    )
    monkeypatch.setattr("edgeq.run.session.start_guest", None)
    monkeypatch.setattr("edgeq_device.engines.catalog.read_vendor", lambda: "AuthenticAMD")
    line = "edgeq-fake-engine 1.2.3 takes only CPUs by GenuineIntel; this one is AuthenticAMD"
    with Engines() as engines, pytest.raises(RuntimeUnavailableError, match=line):
        engines.open(demo.MODEL, SessionSettings(engine=engine))
    monkeypatch.setattr("edgeq_device.engines.catalog.read_vendor", lambda: "GenuineIntel")
    assert problem_of(engine, "1.31.1") == ""


def test_the_runtimes_own_kernels_run_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeq.run.session.start_guest", None)
    own = SessionSettings(engine=load_engines()["onnxruntime"], intra_op_threads=1)
    with Engines() as engines:
        session = engines.open(demo.MODEL, own)
    np.testing.assert_array_equal(session.run(None, FEED)[0], open_session(demo.MODEL).run(None, FEED)[0])


@needs_plugin("openvino")
def test_single_precision_is_single_precision(shared_data: Path) -> None:
    model = shared_data / "mobilenet_v1_0.25_224" / "model.onnx"
    feed = {"input": np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)}
    right = open_session(model).run(None, feed)[0]
    with Engines() as engines:
        found = engines.open(model, SessionSettings(engine=load_engines()["openvino"])).run(None, feed)[0]
    assert 10 * np.log10((right**2).sum() / ((found - right) ** 2).sum()) >= 90


def test_keeps_compiled_models_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replace(fake_engine.install(tmp_path, monkeypatch), cache={"config": {"CPU": {"KEEP": "{folder}"}}})
    options = tmp_path / "options.json"
    with Engines(keep=True) as engines:
        engines.open(demo.MODEL, SessionSettings(engine=engine, precision="bf16"))
        given = json.loads(json.loads(options.read_text())["config"])["CPU"]
        assert given.keys() == {"HINT", "KEEP"}
        folder = Path(given["KEEP"])
        assert (folder.name, folder.parent.is_dir()) == ("fake-bf16", True)
    assert not folder.parent.exists()
    with Engines() as engines:
        engines.open(demo.MODEL, SessionSettings(engine=engine))
    assert "KEEP" not in options.read_text()


@needs_plugin("openvino")
def test_a_session_of_what_was_kept_answers_as_the_first_one() -> None:
    engine = load_engines()["openvino"]
    with Engines(keep=True) as engines:
        for threads in (0, 0, 1):
            session = engines.open(demo.MODEL, SessionSettings(engine=engine, intra_op_threads=threads))
            answer = session.run(None, FEED)[0]
            np.testing.assert_allclose(answer, open_session(demo.MODEL).run(None, FEED)[0], rtol=1e-4, atol=1e-5)


def test_a_package_runs_by_itself_where_the_plugin_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine.install_direct(tmp_path, monkeypatch)
    other = {"image": np.zeros((2, 1, 16, 16), np.float32)}
    with Engines() as engines:
        session = engines.open(demo.MODEL, SessionSettings(engine=engine, precision="bf16"))
        own = open_session(demo.MODEL)
        for feed in (FEED, other, FEED):
            np.testing.assert_array_equal(session.run(None, feed)[0], own.run(None, feed)[0])
        assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [
            (i.name, i.type, i.shape) for i in own.get_inputs()
        ]
        names = [info.name for info in own.get_outputs()][::-1]
        assert len(session.run(names, FEED)) == len(names)
        for wrong in ({}, {"image": FEED["image"].astype(np.float64)}, {"image": FEED["image"][..., :3]}):
            with pytest.raises(ValueError, match="input 'image' is"):
                session.run(None, wrong)
        with pytest.raises(ValueError, match="the model takes only image"):
            session.run(None, {**FEED, "more": FEED["image"]})
    compiled = [json.loads(line) for line in (tmp_path / "compiled.jsonl").read_text().splitlines()]
    assert [line[1] for line in compiled] == [{"HINT": "brain"}] * 2
    assert [line[2] for line in compiled] == [{"0": [1, 1, 16, 16]}, {"0": ["N", 1, 16, 16]}], "the open one on demand"


def test_the_layers_that_a_package_ran_are_those_that_its_plugin_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine.install_direct(tmp_path, monkeypatch)
    with Engines() as engines:
        session = engines.open(demo.MODEL, SessionSettings(engine=engine, profile_prefix=tmp_path / "profile"))
        session.run(None, FEED)
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    assert layers_of(events, load_engines()["openvino"].graph) == (
        EngineLayer("c", "Convolution", "jit_i8", "int8", ("c", "r")),
    )


def test_a_package_that_takes_no_fixed_sizes_runs_open_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine.install_direct(tmp_path, monkeypatch, "takes no fixed sizes")
    with Engines() as engines:
        found = engines.open(demo.MODEL, SessionSettings(engine=engine)).run(None, FEED)[0]
    np.testing.assert_array_equal(found, open_session(demo.MODEL).run(None, FEED)[0])


@pytest.mark.parametrize(
    ("place", "vendor", "package"),
    [
        ("linux x86_64", "GenuineIntel", "onnxruntime-ep-openvino"),
        ("linux x86_64", "AuthenticAMD", "openvino"),
        ("linux arm64", "", "openvino"),
        ("darwin arm64", "", "onnxruntime-ep-openvino"),  # neither package exists there
    ],
)
def test_the_description_decides_which_package_serves(
    place: str, vendor: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engines()["openvino"]
    assert form_for(engine, place, vendor).packages == (package,)
    installed: dict[str, str] = {}
    monkeypatch.setattr("edgeq_device.engines.catalog.read_vendor", lambda: vendor)
    monkeypatch.setattr("edgeq_device.engines.catalog.this_platform", lambda: place)
    monkeypatch.setattr(
        "edgeq_device.engines.catalog.installed_versions",
        lambda names: {n: installed[n] for n in names if n in installed},
    )
    assert serving(engine).packages == (package,)
    if place.startswith("linux"):  # an installed package serves if it can
        installed["openvino"] = "2999.0"
        assert serving(engine).packages == ("openvino",)
        installed["onnxruntime-ep-openvino"] = "1.8.1"
        assert serving(engine).packages == (package,)


def test_a_simulator_is_opened_on_request_and_never_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replace(fake_engine.install(tmp_path, monkeypatch), devices=("NPU",), simulated_on=(this_platform(),))
    assert engine.simulated
    assert "is a simulator" in problem_of(engine, "1.31.1")
    with Engines() as engines:
        session = engines.open(demo.MODEL, SessionSettings(engine=engine))
        assert session.get_providers()[0] == "FakeExecutionProvider"
    with pytest.raises(UsageError, match="fake is a simulator here: its times mean nothing"):
        bench(demo.MODEL, engines=[EngineChoice(engine)])
