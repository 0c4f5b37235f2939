"""Test session options in a model's metadata. edgeq and the runner apply allowed options and refuse the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from edgeq_device.bundle.options import KEY, model_options
from edgeq_device.bundle.package import open_bundle
from edgeq_device.engines.sessions import open_session as open_on_device
from edgeq_device.errors import BundleError

from edgeq import errors
from edgeq.bundle.plan import BundleSpec, VariantSpec
from edgeq.bundle.write import write_bundle
from edgeq.cli import group
from edgeq.measure.bench import open_model
from edgeq.run.session import SessionSettings, open_session
from tests import graphs

OPTION, OTHER = "session.x64quantprecision", "session.disable_prepacking"


def carrying(path: Path, *texts: str) -> Path:
    model = graphs.proto("g (float[N, 4] x) => (float[N, 4] y) { y = Relu (x) }")
    model.metadata_props.add(key="names", value="n" * 10_000)
    for text in texts:
        model.metadata_props.add(key=KEY, value=text)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return carrying(tmp_path / "m.onnx", json.dumps({OPTION: "1"}))


def entry(session: Any, key: str) -> str:
    return str(session.get_session_options().get_session_config_entry(key))


def test_every_session_of_the_file_has_them(model: Path) -> None:
    given = SessionSettings(config={OTHER: "1"})
    for session in (open_session(model, given), open_session(model.read_bytes(), given)):
        assert (entry(session, OPTION), entry(session, OTHER)) == ("1", "1")
    assert entry(open_session(model, SessionSettings(config={OPTION: "0"})), OPTION) == "0", "what is given counts more"
    with open_model(model) as loaded:
        assert loaded.settings.config == {OPTION: "1"}


def test_the_runner_sets_them_too(model: Path, tmp_path: Path) -> None:
    write_bundle(BundleSpec("b", (VariantSpec("one", model),)), tmp_path / "b")
    with open_bundle(tmp_path / "b") as bundle:
        (variant,) = bundle.components["model"]
        assert variant.session_options == {OPTION: "1"}
        assert entry(open_on_device(variant), OPTION) == "1"


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (['{"session.enable_profiling": "1"}'], "'session.enable_profiling' is not one"),
        (['{"session.model_external_initializers_file_folder_path": "/etc"}'], "writer of the bundle sets itself"),
        (['{"session.x64quantprecision": "2"}'], "it can be 0, 1"),
        (['{"session.x64quantprecision": 1}'], "is not a text"),
        (["[]"], "not a JSON object"),
        (["{"], "not valid JSON"),
        (["{}", "{}"], "twice in its metadata"),
    ],
)
def test_refuses_forbidden_options_in_models(texts: list[str], says: str, tmp_path: Path) -> None:
    path = carrying(tmp_path / "m.onnx", *texts)
    with pytest.raises(BundleError, match=says):
        model_options(path, "m.onnx")
    with pytest.raises(errors.BundleError, match=says):
        open_session(path)
    done = CliRunner().invoke(group, ["bench", str(path), "--duration", "0.01"])
    assert done.exit_code in (errors.BundleError.exit_code, errors.ModelError.exit_code)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"no model", b"\x72\xff", b"ORTM" * 4])
def test_files_that_are_not_models_have_no_options(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    assert model_options(tmp_path / "m.onnx", "m") == model_options(content, "m") == {}
    assert model_options(tmp_path / "absent.onnx", "m") == {}


@pytest.mark.parametrize("command", ["eval", "bench", "compare", "debug", "audit"])
def test_options_by_hand_are_those_of_the_table(command: str, model: Path, tmp_path: Path) -> None:
    words = {
        "eval": [str(model), "--data", "d"],
        "bench": [str(model)],
        "compare": [str(model), str(model)],
        "debug": [str(model), str(model), "--data", "d"],
        "audit": [str(model)],
    }[command]
    wrong = ((OPTION[:-1] + "=1", f"Did you mean {OPTION}?"), (OPTION, "KEY=VALUE"), (OPTION + "=2", "0, 1"))
    for option, says in wrong:
        done = CliRunner().invoke(group, [command, *words, "--session-option", option])
        assert (done.exit_code, says in done.stderr) == (errors.UsageError.exit_code, True), done.stderr


def test_options_by_hand_are_set(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    seen: list[dict[str, str]] = []

    def spy(path: Path, settings: SessionSettings) -> Any:
        seen.append(dict(settings.config))
        return open_session(path, settings)

    monkeypatch.setattr("edgeq.run.session.open_session", spy)
    np.save(tmp_path / "x.npy", np.ones((2, 4), np.float32))
    reference = carrying(tmp_path / "float.onnx")
    by_hand = ["--data", str(tmp_path / "x.npy"), "--session-option", f"{OTHER}=1", "--json"]
    for words in (
        ["eval", str(model), "--reference", str(reference)],
        ["bench", str(model), "--duration", "0.01", "--queries", "1"],
        ["compare", str(reference), str(model), "--no-timing"],
    ):
        seen.clear()
        done = CliRunner().invoke(group, [*words, *by_hand])
        assert done.exit_code == 0, done.output
        assert {OPTION: "1", OTHER: "1"} in seen, words
