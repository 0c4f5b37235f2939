"""Test recoveries: they get the samples that backends need, are refused without effect, and are kept if they help."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgeq
from edgeq.errors import UsageError
from edgeq.hardware.target import resolve
from edgeq.prove.job import build
from edgeq.tuning.recover.run import Recoverer
from tests.tuning.recover.nets import few, job_of, two_gates, uneven
from tests.tuning.recover.test_standalone import SHAPE, workspace

__all__ = ["workspace"]

pytestmark = pytest.mark.usefixtures("exact_kernels")


def test_a_build_with_recoveries_gets_the_samples(tmp_path: Path) -> None:
    """A build with recoveries gets the samples, to which the systolic backend fits weights and biases."""
    target = resolve("gemmini")
    job = job_of(two_gates(uneven), tmp_path, few(9, SHAPE))
    scheme = target.profile.scheme
    (tmp_path / "plain").mkdir()
    plain = build(job, target, scheme, tmp_path / "plain" / "q.onnx")
    recoverer = Recoverer(job, target, tmp_path)
    for again in range(2):  # the second build was made in another folder before
        recoverer.state(scheme, ("float-head",), tmp_path / "tried.onnx")
        (folder := tmp_path / f"recovered{again}").mkdir()
        recovered = recoverer.build(scheme, ("float-head",), folder / "q.onnx")
        for name, file in plain.artifact.files.items():
            assert recovered.artifact.files[name] == folder / name
            assert (folder / name).read_bytes() == file.read_bytes()
        assert recovered.artifact.model.read_bytes() == plain.artifact.model.read_bytes()


@pytest.mark.parametrize("name", ["gemmini", "nvidia-t4"])
@pytest.mark.parametrize("recovery", ["sequential-correction"])
def test_refuses_recoveries_without_effect(workspace: Path, name: str, recovery: str) -> None:
    with pytest.raises(UsageError, match=rf"{recovery} has no effect on what .* for {name}.*cross-layer-equalization"):
        edgeq.quantize(
            workspace / "m.onnx",
            edgeq.Data(workspace / "x.npz"),
            workspace / "q.onnx",
            target=name,
            builder=edgeq.recovering(recovery),
        )
    assert not (workspace / "q.onnx").exists()


def test_a_recovery_that_does_harm_is_not_kept(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "edgeq.tuning.recover.methods.sequential_correction.find_shift",
        lambda view, wanted, values: np.ones(wanted.shape[-1]),
    )
    given = (workspace / "m.onnx", edgeq.Data(workspace / "x.npz"))
    found = edgeq.quantize(
        *given,
        workspace / "q.onnx",
        target="generic-arm64",
        timed=False,
        builder=edgeq.recovering("sequential-correction"),
    )
    plain = edgeq.quantize(*given, workspace / "p.onnx", target="generic-arm64", timed=False)
    assert (workspace / "q.onnx").read_bytes() == (workspace / "p.onnx").read_bytes()
    assert found.proof.agreement.sqnr_db == plain.proof.agreement.sqnr_db
    assert any(
        note.startswith("sequential-correction: left out, because the result is worse: ") for note in found.notes
    )
