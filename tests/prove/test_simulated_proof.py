"""Test that figures come from the target's simulator if layers run in float16 there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.data.open_source import Data
from edgeq.hardware.target import Target, resolve
from edgeq.measure.coverage import coverage_of
from edgeq.measure.node_runs import HALF, NodeRun
from edgeq.prove import builds
from edgeq.prove.builds import prove_built, simulated_proof, target_coverage
from edgeq.prove.job import build
from edgeq.run.session import SessionSettings, open_session
from edgeq.scheme import Scheme
from tests.backends.build import mixed
from tests.opened import open_job


class Half:
    """Wrap a session and add noise to its outputs."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def get_outputs(self) -> Any:
        return self._session.get_outputs()

    def run(self, names: Any, feed: Any) -> list[Any]:
        random = np.random.default_rng(0)
        return [
            one + random.normal(0, one.std(), one.shape).astype(one.dtype) for one in self._session.run(names, feed)
        ]


class Simulating:
    """Stand in for a backend with a simulator."""

    def simulator(self) -> Any:
        @contextmanager
        def simulated(target: Target) -> Iterator[Callable[[Path, SessionSettings], Any]]:
            yield lambda model, settings: Half(open_session(model, settings))

        return simulated


@pytest.mark.parametrize(("precision", "own"), [(HALF, True), ("int8", False)])
def test_float16_layers_are_measured_in_the_simulator(
    precision: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.onnx").write_bytes(mixed().SerializeToString())
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(8, 1, 8, 8, 8)).astype(np.float32))
    job = open_job(tmp_path / "m.onnx", Data(tmp_path / "x.npz"), None, tmp_path / "work")
    built = build(job, resolve("generic-x86-64"), Scheme(), tmp_path / "int8.onnx")
    run = NodeRun("conv", "conv", "Conv", "float", 9, precision)
    artifact = dataclasses.replace(
        built.artifact,
        simulation=built.artifact.model,
        coverage=coverage_of([run], lambda run: "", basis="modelled", how="a table"),
    )
    proof = prove_built(job, built, target_coverage(job, built, emulate=False), timed=False)
    assert proof.agreement.sqnr_db > 10
    monkeypatch.setattr(builds, "backend_for", lambda target: Simulating())
    found = simulated_proof(job, dataclasses.replace(built, artifact=artifact), proof)
    assert (found.agreement.sqnr_db < 10) == own
    assert found.samples == 8
