"""Test the evaluator for this machine on the embedded demo model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from edgeq import demo
from edgeq.backends.qnn.backend import Delegation
from edgeq.data.open_source import Data
from edgeq.errors import EdgeqError
from edgeq.hardware.target import Target, resolve
from edgeq.measure.accuracy import evaluate
from edgeq.measure.task import make_task
from edgeq.model.sizes import free_sizes
from edgeq.prove.job import Job
from edgeq.run.session import Engines, SessionSettings, open_session
from edgeq.tuning.float_layers import MacCosts, find_affordable, select_float_layers
from edgeq.tuning.local import LocalEvaluator
from edgeq.tuning.space import Candidate, kernel_candidates, method_candidates
from tests.measure.fakes import FakeSession
from tests.opened import open_job


@pytest.fixture(scope="module")
def target() -> Target:
    return resolve("auto")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    workdir = tmp_path_factory.mktemp("job")
    return open_job(demo.MODEL, Data(demo.CALIBRATION, count=16), Data(demo.VALIDATION, count=120), workdir)


@pytest.fixture
def evaluator(job: Job, target: Target, tmp_path: Path) -> LocalEvaluator:
    return LocalEvaluator(replace(job, task=make_task("classification")), target, tmp_path)


@pytest.fixture(scope="module")
def first(target: Target) -> Candidate:
    return kernel_candidates(target.profile)[0]


def test_methods_share_a_structure_and_granularity_does_not(
    evaluator: LocalEvaluator, first: Candidate, target: Target
) -> None:
    method = next(c for c in method_candidates(first, target.profile) if "mse" in c.name)
    tensor = first.replace(name="per tensor", scheme=first.scheme.replace(per_channel=False))
    kernel, other, coarse = (evaluator.build(c) for c in (first, method, tensor))
    assert kernel.structure == other.structure
    assert kernel.content != other.content
    assert kernel.structure != coarse.structure
    assert kernel.int8_mac_share > 0.9
    assert kernel.bytes < demo.MODEL.stat().st_size
    assert kernel.sqnr_db > 15


def test_accuracy_in_steps_is_accuracy_in_one(evaluator: LocalEvaluator, job: Job, first: Candidate) -> None:
    assert evaluator.total == 120
    part = evaluator.assess([first], 40)[first.name]
    whole = evaluator.assess([first], 120)[first.name]
    assert (part.samples, part.complete) == (40, False)
    assert (whole.samples, whole.complete) == (120, True)
    built = evaluator.built(first).artifact
    task = make_task("classification")
    expected = evaluate(open_session(built.model, built.settings()), job.validation, task)
    assert whole.metrics == expected.metrics
    assert evaluator.float_metrics() == evaluate(job.prepared.path, job.validation, task).metrics
    # With fewer samples, as after an interruption, the assessment starts again.
    assert evaluator.assess([first], 40)[first.name] == part


def test_a_race_times_every_runner_against_float(evaluator: LocalEvaluator, first: Candidate) -> None:
    race = evaluator.time({"float32": (None, 1), "int8": (first, 1)}, "float32", tie=0.05, rough=True, seconds=0.5)
    assert set(race.timings) == {"float32", "int8"}
    assert race.timings["float32"].speedup is None
    assert race.timings["int8"].speedup is not None
    assert race.timings["int8"].latency["p50_ms"] > 0
    assert sum(race.histograms["counts"]["int8"]) == race.timings["int8"].latency["count"]


def test_throughput_is_of_batches_where_the_batch_is_free(
    job: Job, target: Target, first: Candidate, tmp_path: Path
) -> None:
    evaluator = LocalEvaluator(job, target, tmp_path, batched=True)
    race = evaluator.time({"float32": (None, 1)}, "float32", tie=0.05, rough=True, seconds=0.2)
    figures = race.timings["float32"].latency
    assert figures["samples_per_s"] == pytest.approx(8e3 / figures["mean_ms"], rel=0.2)


def test_memory_of_float_and_of_a_candidate(evaluator: LocalEvaluator, first: Candidate) -> None:
    assert evaluator.memory(first, 1) >= 0
    assert evaluator.memory(None, 1) > 0


def test_an_unknown_recovery_is_an_error_and_not_a_crash(evaluator: LocalEvaluator, first: Candidate) -> None:
    with pytest.raises(EdgeqError, match="unknown recovery"):
        evaluator.build(first.replace(name="x", recoveries=("magic",)))


def test_recoveries_build(evaluator: LocalEvaluator, first: Candidate) -> None:
    names = evaluator.recovery_groups()[0]
    assert names
    plain = evaluator.build(first)
    recovered = evaluator.build(first.replace(name="recovered", recoveries=names))
    assert recovered.content != plain.content


def test_layers_that_are_ranked_can_be_built_in_float(evaluator: LocalEvaluator, first: Candidate) -> None:
    ranking = evaluator.rank(first, headroom=math.inf, seconds=math.inf)
    assert len(ranking.layers) > 2
    nodes = select_float_layers(ranking, lambda nodes: 1 / len(nodes), 0.5, lambda: False)[-1]
    mixed = first.replace(name="mixed", scheme=first.scheme.replace(exclude=nodes))
    assert evaluator.build(mixed).int8_mac_share < evaluator.build(first).int8_mac_share


def test_without_tensors_to_rank_layers_are_probed(evaluator: LocalEvaluator, first: Candidate) -> None:
    scheme = first.scheme.replace(mode="dynamic", dynamic_weight_types={"Conv": "uint8", "Gemm": "uint8"})
    dynamic = first.replace(name="dynamic", scheme=scheme)
    ranking = evaluator.rank(dynamic, headroom=math.inf, seconds=math.inf)
    layers = [node for layer in ranking.layers for node in layer.nodes]
    assert len(layers) > 1
    assert len(set(layers)) == len(layers)
    assert isinstance(ranking.costs, MacCosts)
    assert all(layer.noise > 0 for layer in ranking.layers)
    assert evaluator.rank(dynamic, headroom=0, seconds=math.inf).layers == ()


@pytest.mark.parametrize("name", ["nvidia-t4", "gemmini"])
def test_simulated_targets_are_ranked_layer_by_layer_without_a_clock(job: Job, name: str, tmp_path: Path) -> None:
    target = resolve(name)
    evaluator = LocalEvaluator(replace(job, task=make_task("classification")), target, tmp_path, counts=True)
    assert evaluator.counts
    assert evaluator.recovery_groups() == ()
    candidate = kernel_candidates(target.profile)[0]
    built = evaluator.built(candidate).artifact
    assert evaluator.build(candidate).int8_mac_share == pytest.approx(
        built.coverage.int8_mac_share if built.coverage else 0
    )
    found = evaluator.assess([candidate], evaluator.total)[candidate.name]
    task = make_task("classification")
    proof = evaluate(open_session(built.proof_model, built.proof_settings()), job.validation, task)
    assert found.metrics == proof.metrics
    assert found.bound == evaluator.float_metrics()["top1"] - proof.metrics["top1"], "no estimate for other samples"
    ranking = evaluator.rank(candidate, headroom=1.0, seconds=math.inf)
    assert [len(layer.nodes) for layer in ranking.layers] == [1] * len(ranking.layers)
    assert len(find_affordable(ranking, 1.0)) == len(ranking.layers) - 1
    mixed = candidate.replace(name="mixed", scheme=candidate.scheme.replace(exclude=ranking.layers[0].nodes))
    assert evaluator.build(mixed).int8_mac_share < evaluator.build(candidate).int8_mac_share


class SlowEngine:
    """Imitate a simulator with the CPU's kernels, or with the same answer for all inputs. `runs` counts samples."""

    def __init__(self, right: bool) -> None:
        self.right, self.runs = right, 0

    def open(self, model: Path, settings: SessionSettings, place: int = 0) -> Any:
        assert place == 0
        session = open_session(model)
        if settings.engine is None:
            return session
        name = session.get_outputs()[0].name

        def answer(feed: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            self.runs += 1
            made = session.run(None, feed)[0]
            return {name: made if self.right else -made}

        return FakeSession(answer, [name])


@pytest.fixture
def npu(job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[SlowEngine], LocalEvaluator]:
    """Return a function that makes an evaluator for an NPU, which runs every node, with a given simulator."""
    backend = "edgeq.backends.qnn.backend"
    monkeypatch.setattr(f"{backend}.find_library", lambda *arguments: Path())
    monkeypatch.setattr(f"{backend}.read_installed_version", lambda engine: "2.7.0")
    monkeypatch.setattr(
        f"{backend}.find_delegation",
        lambda source, *rest: Delegation(source, (frozenset(str(n.name) for n in source.graph),), {}, "a test"),
    )
    monkeypatch.setattr("edgeq.tuning.local.simulated_count", lambda prepared, artifact: 5)
    sizes = dict.fromkeys(free_sizes(job.prepared.model), 1)
    fixed = open_job(demo.MODEL, Data(demo.CALIBRATION, count=8), Data(demo.VALIDATION, count=60), tmp_path, fix=sizes)
    task = make_task("classification")

    def evaluator(engine: SlowEngine) -> LocalEvaluator:
        place = tmp_path / "evaluator"
        place.mkdir()
        found = LocalEvaluator(
            replace(fixed, task=task), resolve("hexagon-v73"), place, counts=True, engines=cast(Engines, engine)
        )
        assert found.recovery_groups()
        return found

    return evaluator


def test_stops_simulating_refuted_candidates(npu: Callable[[SlowEngine], LocalEvaluator]) -> None:
    engine = SlowEngine(right=False)
    evaluator = npu(engine)
    found = evaluator.simulate(kernel_candidates(resolve("hexagon-v73").profile)[0], 0.01, math.inf)
    assert found is not None
    assert found.low > 0.01
    assert found.samples == engine.runs == 5


def test_clearly_good_candidates_simulate_few_samples(npu: Callable[[SlowEngine], LocalEvaluator]) -> None:
    engine = SlowEngine(right=True)
    evaluator = npu(engine)
    candidate = kernel_candidates(resolve("hexagon-v73").profile)[0]
    whole = evaluator.assess([candidate], evaluator.total)[candidate.name]
    found = evaluator.simulate(candidate, whole.drop + 0.01, math.inf)
    assert found is not None
    assert found.samples == engine.runs == 5
    assert found.drop == pytest.approx(whole.drop)
    assert [found.low, found.high] == pytest.approx([whole.low, whole.high])
    assert len(evaluator.proof_job(40).validation) == 40


def test_recoveries_edit_what_a_simulated_npu_gets(npu: Callable[[SlowEngine], LocalEvaluator]) -> None:
    evaluator = npu(SlowEngine(right=True))
    plain = kernel_candidates(resolve("hexagon-v73").profile)[0]
    recovered = plain.replace(name="recovered", recoveries=evaluator.recovery_groups()[0])
    assert evaluator.build(recovered).content != evaluator.build(plain).content
    ranking = evaluator.rank(recovered, headroom=1.0, seconds=math.inf)
    first = ranking.layers[0]
    assert ranking.field == "wide"
    wide = recovered.replace(name="wide", scheme=recovered.scheme.replace(wide=first.nodes))
    assert 0 < evaluator.build(wide).wide_share < 1


def test_lucky_candidates_are_not_chosen_for_a_simulator(
    npu: Callable[[SlowEngine], LocalEvaluator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No candidate for a simulator is chosen by luck: float32's scores for changed answers count, not only the labels.

    The uncertainty is left out of the bound.
    """
    monkeypatch.setattr("edgeq.tuning.accuracy_estimate._combine", lambda drop, error, regret: (0.04, 0.02))
    evaluator = npu(SlowEngine(right=True))
    (candidate, *_) = kernel_candidates(resolve("hexagon-v73").profile)
    whole = evaluator.assess([candidate], evaluator.total)[candidate.name]
    assert whole.drop < whole.expected == whole.bound == 0.04
    found = evaluator.simulate(candidate, 0.01, math.inf)
    assert found is not None
    assert found.bound == pytest.approx(0.04)
