"""Test the guest program on this machine's own kernels: the same program and frames, without an emulator."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from edgeq_device.measure.features import read_features

from edgeq.emulate.emulator import probe, probe_model
from edgeq.errors import DataError, RuntimeUnavailableError
from edgeq.measure.coverage import profile
from edgeq.run.session import GuestProgram, PythonCommand, SessionSettings, guest_environment, open_session, start_guest


@pytest.fixture
def here() -> Iterator[GuestProgram]:
    """Start a guest on this machine's own kernels."""
    environment = guest_environment(os.environ)
    with start_guest(PythonCommand((sys.executable,), (), environment), "a guest") as guest:
        yield guest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "probe.onnx"
    file.write_bytes(probe_model())
    return file


def test_a_session_there_answers_as_one_here(here: GuestProgram, model: Path) -> None:
    there, local = here.open(model, SessionSettings()), open_session(model)
    assert [(i.name, i.type, i.shape) for i in there.get_inputs()] == [
        (i.name, i.type, i.shape) for i in local.get_inputs()
    ]
    feeds = {"left": np.random.default_rng(0).integers(0, 256, (8, 64)).astype(np.uint8)}
    np.testing.assert_array_equal(there.run(None, feeds)[0], local.run(None, feeds)[0])
    assert probe(there, "there") == probe(local, "here")
    there.close()


def test_a_profile_there_is_as_one_here(here: GuestProgram, model: Path) -> None:
    feeds = {"left": np.ones((8, 64), np.uint8)}
    there, local = profile(model, SessionSettings(), feeds, opener=here.open), profile(model, SessionSettings(), feeds)
    assert there.weights == local.weights
    assert [(k.name, k.op_type, k.inputs) for k in there.kernels] == [
        (k.name, k.op_type, k.inputs) for k in local.kernels
    ]


def test_it_says_what_it_is(here: GuestProgram) -> None:
    seen = here.features()
    architecture, features = read_features()
    assert seen["architecture"] == architecture
    assert set(seen["features"]) <= features | {"avx_vnni_int8", "avx_vnni_int16"}
    assert seen["onnxruntime"] == onnxruntime.__version__
    assert seen["trapped"] == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_numpy_has_no_threads_there() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = set(children.read_text().split())
    with start_guest(PythonCommand((sys.executable,), (), guest_environment(environment)), "a guest") as guest:
        guest.features(runtime=False)
        (child,) = set(children.read_text().split()) - before
        assert len(list(Path(f"/proc/{child}/task").iterdir())) == 1


def test_reports_refusals_of_the_runtime(here: GuestProgram, model: Path) -> None:
    session = here.open(model, SessionSettings())
    with pytest.raises(ValueError, match=r"Got: 7 Expected: 8"):
        session.run(None, {"left": np.zeros((7, 64), np.uint8)})
    with pytest.raises(DataError, match=r"'left' contains texts"):
        session.run(None, {"left": np.array(["a"], object)})
    with pytest.raises(RuntimeUnavailableError, match=r"refuses variant"):
        here.open(Path(__file__), SessionSettings())
    assert probe(session, "still there") in ("exact", "saturated")


def test_compiled_modules_are_kept_where_the_command_says_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("")
    code = ("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import module")
    command = PythonCommand((sys.executable,), (), {})
    subprocess.run([*command.python, *code], check=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["module.py"]
    subprocess.run([*replace(command, compiled=tmp_path / "kept").python, *code], check=True)
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.pyc")} == {"kept"}


def test_a_guest_that_dies_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("import os, sys\nprint('the last word', file=sys.stderr)\nos._exit(3)\n")
    command = PythonCommand((sys.executable,), (), guest_environment(os.environ), (tmp_path,))
    with start_guest(command, "the guest") as guest, pytest.raises(RuntimeUnavailableError) as death:
        guest.features()
    assert str(death.value) == "the guest ended: the last word"


def test_a_program_that_is_not_there() -> None:
    command = PythonCommand(("/no/such/qemu",), (), dict(os.environ))
    with pytest.raises(RuntimeUnavailableError, match=r"/no/such/qemu cannot be started"), start_guest(command, "x"):
        pass
