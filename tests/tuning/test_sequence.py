from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgeq.calibration.collect import collect
from edgeq.data.samples import Samples
from edgeq.errors import UsageError
from edgeq.hardware.target import Target, resolve
from edgeq.model.prepare import PreparedModel
from edgeq.prove.job import Job
from edgeq.run.session import open_session
from edgeq.tuning.candidate_builder import CandidateBuilder
from edgeq.tuning.space import build_sequence, product_share, sequence_candidates
from edgeq.util.display import SILENT
from tests.backends.networks import model_of, operators, prepared, recurrent, sqnr_db
from tests.tuning.recover.encoder import Sentences, encoder

pytestmark = pytest.mark.usefixtures("exact_kernels")


@pytest.fixture(scope="module")
def target() -> Target:
    return resolve("cpu-any")


def job_of(model: PreparedModel, samples: Samples | None) -> Job:
    return Job(model.source, model, samples, samples or Sentences(), False, None)


def names(model: PreparedModel, target: Target, samples: Samples | None = None) -> list[str]:
    return [c.name for c in sequence_candidates(job_of(model, samples), target)]


def test_each_model_gets_what_it_has_use_for(tmp_path: Path, target: Target) -> None:
    transformer = names(encoder(tmp_path), target, Sentences())
    assert transformer == [
        "dynamic, smoothed",
        "dynamic, attention fused",
        "dynamic, attention fused, smoothed",
        "static products, smoothed",
        "weight-only 8 bits",
        "weight-only 4 bits",
        "weight-only 4 bits, rounded",
        "weight-only 4 bits, float compute",
        "weight-only 4 bits, float compute, rounded",
    ]
    assert names(prepared(recurrent(), tmp_path), target, Sentences()) == ["dynamic, GRU in float"]
    unsampled = ["weight-only 8 bits", "weight-only 4 bits", "weight-only 4 bits, float compute"]
    assert names(encoder(tmp_path), target) == unsampled, "without samples"


def test_a_convolutional_network_gets_nothing(tmp_path: Path, target: Target) -> None:
    nodes = "[conv] a = Conv(x, w) [flatten] b = Flatten(a) [classify] y = MatMul(b, m)"
    weights = {"w": np.ones((16, 3, 3, 3), np.float32), "m": np.ones((16 * 36, 2), np.float32)}
    model = model_of(nodes, "float[1, 3, 8, 8] x", weights)
    assert product_share(ir.serde.deserialize_model(model)) < 0.5
    assert names(prepared(model, tmp_path), target, Sentences()) == []


def test_other_backends_get_nothing(tmp_path: Path, target: Target) -> None:
    assert names(encoder(tmp_path), dataclasses.replace(target, backend="tensorrt"), Sentences()) == []


def test_every_candidate_is_built_and_follows_float(tmp_path: Path, target: Target) -> None:
    model = encoder(tmp_path)
    samples = Sentences()
    job = dataclasses.replace(job_of(model, samples), statistics=collect(model.model, samples))
    exact = open_session(model.path)
    least = {"weight-only 4 bits": 8.0, "weight-only 4 bits, rounded": 9.0}
    builder = CandidateBuilder(job, target, tmp_path)
    found: dict[str, float] = {}
    for number, candidate in enumerate(sequence_candidates(job, target)):
        destination = tmp_path / f"{number}.onnx"
        built = builder.build(candidate, destination)
        session = open_session(destination, built.artifact.settings())
        pairs = [(exact.run(None, dict(s.inputs))[0], session.run(None, dict(s.inputs))[0]) for s in samples]
        found[candidate.name] = sqnr_db(*(np.concatenate([p[i].ravel() for p in pairs]) for i in (0, 1)))
        assert found[candidate.name] > least.get(candidate.name.replace(", float compute", ""), 20), candidate.name
    assert found["dynamic, smoothed"] > found["dynamic, attention fused"]
    assert found["weight-only 4 bits, rounded"] > found["weight-only 4 bits"]
    assert {"QAttention"} <= set(operators(tmp_path / "2.onnx"))


def test_candidates_share_common_builds(tmp_path: Path, target: Target) -> None:
    job = job_of(encoder(tmp_path), Sentences())
    fused = [c for c in sequence_candidates(job, target) if "fused" in c.name]
    folders = []
    for candidate in fused:
        build_sequence(job, target, candidate, tmp_path / "q.onnx", SILENT)
        folders.append(sorted(p.name for p in job.prepared.path.parent.iterdir() if p.is_dir()))
    assert len(folders[0]) == 1
    assert folders[0][0] in folders[1]
    kept = job.prepared.path.parent / folders[0][0] / "model.onnx"
    before = kept.stat().st_mtime_ns
    build_sequence(job, target, fused[0], tmp_path / "q.onnx", SILENT)
    assert kept.stat().st_mtime_ns == before


def test_nothing_to_do_is_reported(tmp_path: Path, target: Target) -> None:
    model = encoder(tmp_path)
    job = job_of(model, Sentences())
    candidate = next(c for c in sequence_candidates(job, target) if c.recoveries == ("smoothquant",))
    matrices = [n.name for n in onnx.load(model.path).graph.node if n.op_type in ("MatMul", "Gemm")]
    idle = candidate.replace(scheme=candidate.scheme.replace(exclude=tuple(matrices)))
    with pytest.raises(UsageError, match="smoothquant finds nothing to do"):
        build_sequence(job, target, idle, tmp_path / "q.onnx", SILENT)
    with pytest.raises(UsageError, match="smoothquant needs calibration samples"):
        build_sequence(job_of(model, None), target, candidate, tmp_path / "q.onnx", SILENT)
