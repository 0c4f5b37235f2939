"""Test coverage: a fact about the target's kernels, or a forecast that is named so, never another CPU's fusions."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeq.backends.base import Artifact
from edgeq.data.open_source import Data
from edgeq.emulate.emulator import EmulatedSpeed
from edgeq.emulate.routes import EMULATED, NOT_RUN, ExecutionRoute, Running
from edgeq.errors import BoardError, CheckFailedError, RuntimeUnavailableError
from edgeq.hardware.target import resolve
from edgeq.jobs.package import package
from edgeq.jobs.quantize import Quantized, quantize
from edgeq.prove import builds
from edgeq.prove.job import Built
from edgeq.run.engines import choose_engine
from edgeq.run.session import open_session
from edgeq.scheme import Scheme
from edgeq.util.display import Silent
from edgeq.util.records import plain
from tests.opened import variant_info

THERE = "raspberry-pi-5"  # S8S8: on a CPU without these fusions, most of such a model runs in float
NO_GUEST = ExecutionRoute(NOT_RUN, "", "there is no machine yet. Make one: edgeq emulate setup")


class Notes(Silent):
    """Keep the notes of a job."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def emulated(opener: Any = open_session) -> ExecutionRoute:
    return ExecutionRoute(EMULATED, "a guest", start=lambda: nullcontext(Running(opener, None)))


def quantized(**options: Any) -> Quantized:
    return quantize("net.onnx", Data("calib.npz"), "int8.onnx", target=THERE, timed=False, force=True, **options)


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the route to the target's kernels."""

    def choose(found: ExecutionRoute) -> None:
        monkeypatch.setattr(builds, "find_route", lambda *args, **kwargs: found)

    choose(NO_GUEST)
    return choose


def test_without_its_kernels_it_is_a_forecast_by_rules(place: Path, route: Any) -> None:
    found = quantized(overrides={"exclude": ("last",)}).proof.coverage
    assert (found.basis, found.how) == ("forecast", "the int8 rules of the cpu backend")
    assert found.reason == NO_GUEST.reason
    assert found.int8_mac_share is not None
    assert 0.5 < found.int8_mac_share < 1
    assert [(n.name, n.reason) for n in found.float_nodes if n.macs] == [("last", "kept in float on request")]
    assert found.summary().startswith("about ")
    assert found.summary().endswith("a forecast by the int8 rules of the cpu backend, not measured")
    assert plain(quantized().proof)["coverage"]["int8_mac_share"] == 1


def test_coverage_of_a_plugin_on_a_board_is_unknown() -> None:
    artifact = Artifact(Path("m.onnx"), Scheme(), "CPUExecutionProvider").in_engine(choose_engine("litert"))
    found = builds.target_coverage(None, Built(resolve(THERE), artifact), route=NO_GUEST)  # type: ignore[arg-type]
    assert (found.basis, found.summary()) == ("unknown", "not known: a board does not report what litert executes")


def test_coverage_is_measured_on_kernels_that_run_here(place: Path, route: Any) -> None:
    opened = []

    def opener(model: Path, settings: Any) -> Any:
        opened.append(settings.intra_op_threads)
        return open_session(model, settings)

    route(emulated(opener))
    found = quantized().proof.coverage
    assert (found.basis, found.how, opened) == ("emulated", "a guest", [1])
    assert found.summary().endswith("measured on a guest")
    assert quantized(emulate=False).proof.coverage.basis == "forecast"


def test_an_emulation_that_takes_long_is_announced_or_left_out(place: Path, route: Any) -> None:
    macs = quantized().proof.coverage.int8_macs
    for seconds, noted in ((59, False), (120, True), (3601, False)):
        progress = Notes()
        route(replace(emulated(), speed=EmulatedSpeed(int8=macs / seconds, float=1.0)))
        found = quantized(progress=progress).proof.coverage
        assert (found.basis, found.reason) == (
            ("emulated", "") if seconds < 3600 else ("forecast", "one inference would take about 1.0 h on a guest")
        )
        text = f"{THERE}: running it on a guest takes about 2 min; ⟨emulate=False⟩ skips that"
        assert (text in progress.notes) == noted


def test_a_package_does_not_wait_for_hours_either(place: Path, route: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(emulated(), speed=EmulatedSpeed(int8=1e-9, float=1e-9))
    route(slow)
    monkeypatch.setattr("edgeq.prove.kernel_check.find_route", lambda *args, **kwargs: slow)
    made = package("net.onnx", Data("calib.npz"), "slow", targets=THERE, timed=False)
    found = made.variants[THERE].emulated
    assert found is not None
    assert (found.status, found.where) == ("not run", "not run")
    assert "one inference would take about" in found.reason
    kernels = next(check for check in made.variants[THERE].checks if check.name == "kernels")
    assert (kernels.kind, kernels.detail) == ("none", found.reason)


def test_a_bar_is_held_against_nothing_but_the_targets_kernels(place: Path, route: Any) -> None:
    """A required coverage that cannot be checked here ends with exit code 8 before anything is calibrated."""
    with pytest.raises(RuntimeUnavailableError, match=r"`require_coverage` cannot be checked here: raspberry.*setup"):
        quantized(require_coverage=0.1)
    with pytest.raises(RuntimeUnavailableError, match="cannot be checked here"):
        package("net.onnx", Data("calib.npz"), "dist", targets=(THERE,), require_coverage=0.1)
    assert not Path("int8.onnx").exists()
    route(emulated())
    with pytest.raises(RuntimeUnavailableError, match="`emulate=False` excludes its kernels"):
        quantized(require_coverage=0.1, emulate=False)


def test_a_bar_that_the_target_misses_fails(place: Path, route: Any) -> None:
    route(emulated())
    with pytest.raises(CheckFailedError, match=r"less than the 100\.0% required"):
        quantized(require_coverage=1.0, overrides={"exclude": ("last",)})


def test_kernels_that_do_not_start_leave_the_forecast_and_a_refusal_fails(place: Path, route: Any) -> None:
    def refuse(*args: Any) -> Any:
        raise RuntimeUnavailableError("a guest: no such operator")

    route(ExecutionRoute(EMULATED, "a guest", start=refuse))
    assert quantized().proof.coverage.reason == "a guest: no such operator"
    route(emulated(refuse))
    with pytest.raises(CheckFailedError, match=r"the model fails on raspberry-pi-5 \(a guest\): .* no such operator"):
        quantized()


def test_a_cut_link_says_nothing_of_the_model(place: Path, route: Any) -> None:
    def cut(*args: Any) -> Any:
        raise BoardError("ssh://pi: the link was cut")

    for found in (ExecutionRoute(EMULATED, "over SSH", start=cut), emulated(cut)):
        route(found)
        with pytest.raises(BoardError, match="the link was cut"):
            quantized()


def test_a_bundle_says_what_its_figure_rests_on(place: Path, route: Any) -> None:
    made = package("net.onnx", Data("calib.npz"), "dist", targets=(THERE,), timed=False, emulate=False)
    checks = {check.name: check for check in made.variants[THERE].checks}
    assert checks["coverage"].kind == "none"
    assert "forecast" in checks["coverage"].detail
    assert variant_info(Path("dist"), THERE)["coverage"] == {
        "int8_mac_share": 1.0, "basis": "forecast", "how": "the int8 rules of the cpu backend",
    }  # fmt: skip
