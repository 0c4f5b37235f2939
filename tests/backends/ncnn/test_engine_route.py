"""Test how edgeq proves files for ncnn in ncnn's ARM kernels, and what it reports where that is not possible."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.data.samples import open_samples
from edgeq.emulate import routes
from edgeq.emulate.check import CheckedModel, check_trial, find_route, summarise
from edgeq.emulate.emulator import find_emulator
from edgeq.emulate.machine import require_sysroot
from edgeq.emulate.probe import EXACT, probe_signed
from edgeq.emulate.routes import EMULATED, NOT_RUN, ExecutionRoute, Running, is_emulated_with
from edgeq.emulate.sysroot import Lock, LockedWheel, Sysroot
from edgeq.errors import CheckFailedError, RuntimeUnavailableError, UsageError
from edgeq.hardware.detect import Machine
from edgeq.hardware.profile import load_profiles
from edgeq.hardware.target import find_application_engine, find_target
from edgeq.model.load import model_signature
from edgeq.prove.engine_choices import check_engines, is_other_precision
from edgeq.run.engines import choose_engine, load_engines
from edgeq.run.session import SessionSettings, open_session
from tests.graphs import proto

NCNN = load_engines()["ncnn"]
PI4, PI5 = find_target("raspberry-pi-4-ncnn"), find_target("raspberry-pi-5-ncnn")
SERVER = Machine("x86_64", frozenset({"sse4_1"}))


def test_only_machines_with_the_engine_emulate_it() -> None:
    assert is_emulated_with(PI5, NCNN)
    assert is_emulated_with(find_target("raspberry-pi-5"), NCNN)
    assert not is_emulated_with(PI5, load_engines()["litert"])
    assert not is_emulated_with(find_target("haswell"), NCNN)
    assert find_application_engine(PI5) == NCNN
    assert find_application_engine(find_target("raspberry-pi-5")) is None


def test_without_an_emulator_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # With the engine and without, because the target's applications use only this engine.
    for engine in (NCNN, None):
        route = find_route(PI5, SERVER, engine)
        assert (route.where, route.start) == (NOT_RUN, None)
        assert route.reason.startswith("qemu-aarch64 is not installed")


def test_a_machine_without_the_engine_is_set_up_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulator = find_emulator("arm64")
    old = Sysroot(tmp_path, tmp_path, None, Lock(tmp_path, wheels=(LockedWheel("numpy-2.0-any.whl", ""),)))
    monkeypatch.setattr("edgeq.emulate.machine.load_sysroot", lambda emulator: old)
    with pytest.raises(RuntimeUnavailableError, match=r"does not contain ncnn. Set it up again: edgeq emulate setup"):
        require_sysroot(emulator, NCNN.packages)
    assert require_sysroot(emulator, ("numpy",)) == old
    assert not routes.is_complete(old, emulator)
    # Nothing is known about a file system that the user provided.
    assert routes.is_complete(replace(old, lock=Lock(tmp_path)), emulator)


def test_the_probe_adds_signed_products_exactly() -> None:
    assert probe_signed(lambda file, settings: Closing(open_session(file)), NCNN, "here") == EXACT
    with pytest.raises(CheckFailedError, match="there: integer products are wrong"):
        probe_signed(lambda file, settings: Closing(open_session(file), 1), NCNN, "there")


class Closing:
    """Wrap a session that an engine's process would close, and add a number to its outputs."""

    def __init__(self, session: Any, added: float = 0) -> None:
        self._session, self._added = session, added

    def run(self, names: Any, feeds: Any) -> list[Any]:
        return [output + self._added for output in self._session.run(names, feeds)]

    def close(self) -> None:
        """Do nothing."""


def test_a_profile_that_needs_an_applications_runtime_is_used_by_name_only() -> None:
    profiles = load_profiles()
    named = {name for name, profile in profiles.items() if profile.named_only}
    assert {"ncnn-arm", "litert-xnnpack"} <= named
    assert named.isdisjoint(("arm64-dotprod", "arm64-neon", "cpu-any", "nvidia-sm75"))


@pytest.mark.parametrize(
    ("change", "equal", "says"),
    [
        (lambda x: x, 4, "every value is equal to this machine's in 4 of 4 samples"),
        (lambda x: x + np.float32(0.125), 0, "in 0 of 4 samples; the largest difference is 0.125"),
    ],
)
def test_equal_values_are_counted(change: Callable[[Any], Any], equal: int, says: str, tmp_path: Path) -> None:
    model, twin = tmp_path / "m.onnx", tmp_path / "simulation.onnx"
    onnx.save(proto("double (float[1, 4] x) => (float[1, 4] y) { y = Add(x, x) }"), twin)
    # The shipped file is in a format that nothing here opens.
    model.write_bytes(b"")
    x = np.round(np.random.default_rng(0).uniform(-8, 8, (4, 4))).astype(np.float32)

    class Changed:
        def __init__(self, session: Any) -> None:
            self._session = session
            self.get_outputs = session.get_outputs

        def run(self, names: Any, feeds: Any) -> list[Any]:
            return [change(output) for output in self._session.run(names, feeds)]

    running = Running(lambda file, settings: Changed(open_session(twin)), None)
    route = ExecutionRoute(EMULATED, "a test", start=lambda: nullcontext(running))
    trial = CheckedModel(
        model,
        SessionSettings(engine=NCNN),
        float_model=twin,
        samples=open_samples([row[None] for row in x], model_signature(twin)),
        host=(twin, SessionSettings()),
    )
    result = check_trial(trial, PI5, SERVER, route=route)
    assert (result.samples, result.equal) == (4, equal), result.reason
    assert says in "\n".join(summarise([result]))


def test_without_the_engine_here_only_the_self_test_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m.onnx"
    onnx.save(proto("double (float[1, 4] x) => (float[1, 4] y) { y = Add(x, x) }"), model)
    monkeypatch.setattr("edgeq.emulate.check.describe_problem", lambda engine, runtime: "it is not installed here")
    running = Running(lambda file, settings: open_session(model), None)
    x = np.ones((1, 4), np.float32)
    trial = CheckedModel(
        model,
        SessionSettings(engine=NCNN),
        [({"x": x}, {"y": x + x})],
        {"y": 0.0},
        samples=open_samples([x], model_signature(model)),
    )
    result = check_trial(
        trial, PI5, SERVER, route=ExecutionRoute(EMULATED, "a test", start=lambda: nullcontext(running))
    )
    assert (result.status, result.samples) == ("passed", 0)
    assert result.reason == "its answers on data were not compared with this machine's: it is not installed here"


def test_16_bit_floats_need_instructions_for_them() -> None:
    half = choose_engine("ncnn:f16")
    assert is_other_precision(half, PI5)
    assert not is_other_precision(half, PI4)
    assert not is_other_precision(choose_engine("ncnn"), PI5)
    assert not is_other_precision(half, find_target("raspberry-pi-5"))
    assert check_engines([half], [PI4, PI5]) == (half,)
    with pytest.raises(UsageError, match="there is no ncnn for raspberry-pi-4-ncnn"):
        check_engines([half], [PI4])
