"""Test that calibration, evaluation and tuning give the same results with workers as without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper

from edgeq import demo
from edgeq.cli import group
from edgeq.data.open_source import Data
from edgeq.data.samples import Samples, Sharded, open_samples
from edgeq.distributed.workers import Workers, open_workers
from edgeq.errors import DataError, UsageError
from edgeq.hardware.target import resolve
from edgeq.jobs.calibrate import calibrate
from edgeq.jobs.quantize import quantize
from edgeq.measure.accuracy import RunningEvaluation
from edgeq.measure.evaluation import EvalRequest, run_evaluation
from edgeq.measure.inference import infer
from edgeq.measure.loaded_model import open_model
from edgeq.measure.task import Task, make_task
from edgeq.model.load import model_signature
from edgeq.run.session import SessionSettings
from edgeq.tuning.local import LocalEvaluator
from edgeq.tuning.space import kernel_candidates
from edgeq.util.records import plain
from tests.distributed.jobs import dies_at, lives
from tests.graphs import proto
from tests.measure.fakes import linear_model
from tests.opened import open_job

ONE = SessionSettings(intra_op_threads=1)


@pytest.fixture(scope="module")
def pool(address: str) -> Iterator[Workers]:
    """Open the workers that the commands use."""
    with open_workers(address) as opened:
        assert opened is not None
        yield opened


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(group, [str(word) for word in words])


def demo_samples(count: int | None = None) -> Samples:
    return open_samples(demo.VALIDATION, model_signature(demo.MODEL), count=count)


def test_statistics_have_the_same_bytes(address: str, tmp_path: Path) -> None:
    for name, options in (("here", ("--threads", "1")), ("there", ("--workers", address))):
        done = run("calibrate", demo.MODEL, "--data", demo.CALIBRATION, "-o", tmp_path / name, *options)
        assert done.exit_code == 0, done.output
    for file in ("statistics.json", "statistics.npz"):
        assert (tmp_path / "here" / file).read_bytes() == (tmp_path / "there" / file).read_bytes()


@pytest.mark.parametrize("job", ["calibrate", "eval"])
def test_a_worker_that_is_killed_on_the_way_changes_no_byte(
    job: str, address: str, pool: Workers, tmp_path: Path
) -> None:
    def result(name: str) -> list[bytes]:
        options = ("--task", "classification", "--json") if job == "eval" else ("-o", tmp_path / name)
        done = run(job, demo.MODEL, "--data", demo.VALIDATION, "--count", "60", "--workers", address, *options)
        assert done.exit_code == 0, done.output
        if job == "eval":
            return [done.stdout.encode()]
        return [(tmp_path / name / file).read_bytes() for file in ("statistics.json", "statistics.npz")]

    whole = result("whole")
    pool._client.wait_for_workers(2)  # an earlier test may have ended one
    assert pool.everywhere(dies_at, 270, tmp_path / "died")
    try:
        assert result("again") == whole
        assert (tmp_path / "died").exists()
    finally:
        pool.everywhere(lives)


def test_samples_that_workers_cannot_read_are_streamed(address: str, pool: Workers) -> None:
    samples = [dict(sample.inputs) for sample in demo_samples(20)]
    opened = open_samples(samples, model_signature(demo.MODEL))
    assert Sharded(opened, pool).reference is None
    assert Sharded(demo_samples(), pool).reference is not None
    assert calibrate(demo.MODEL, samples, workers=address) == calibrate(demo.MODEL, samples, threads=1)


def test_a_poisoned_sample_fails_with_its_name(address: str, tmp_path: Path) -> None:
    arrays = np.stack([next(iter(s.inputs.values()))[0] for s in demo_samples(24)])
    arrays[17, 0] = np.nan
    np.savez(tmp_path / "x.npz", **{model_signature(demo.MODEL).inputs[0].name: arrays})
    with pytest.raises(DataError, match=r"x\.npz\[17\].*NaN"):
        calibrate(demo.MODEL, tmp_path / "x.npz", workers=address)


@pytest.mark.parametrize("task", ["classification", None])
def test_evaluation_gives_the_same_record(address: str, task: str | None) -> None:
    request = EvalRequest(demo.MODEL, demo.VALIDATION, task, reference=demo.MODEL, count=70, settings=ONE)
    here, there = (plain(run_evaluation(request, workers=workers)) for workers in (None, address))
    assert there == here
    assert there["samples"] == 70


def test_a_task_of_ones_own(address: str, tmp_path: Path) -> None:
    meter = (
        "class Meter:\n    n = 0\n    def update(self, o, s): self.n += 1\n    def result(self): return {'n': self.n}\n"
    )
    shared = "    def collected(self): return self.n\n    def take(self, n): self.n += n\n"
    made = (
        "class T:\n    name, primary, higher_is_better = 'mine', 'n', True\n    def start(self): return Meter()\n"
        "def make(options): return T()\n"
    )
    (tmp_path / "mine.py").write_text(meter + shared + made)
    request = EvalRequest(demo.MODEL, demo.VALIDATION, f"{tmp_path / 'mine.py'}:make", count=20)
    accuracy = run_evaluation(request, workers=address).accuracy
    assert accuracy is not None
    assert accuracy.value == 20
    (tmp_path / "alone.py").write_text(meter + made)
    with pytest.raises(UsageError, match="cannot be shared among workers"):
        run_evaluation(replace(request, task=f"{tmp_path / 'alone.py'}:make"), workers=address)


def test_the_proof_of_quantize(address: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", x=random.standard_normal((20, 8)).astype(np.float32))
    graph = "m (float[N,8] x, float[8,8] w) => (float[N,8] y) { h = MatMul(x, w) y = Relu(h) }"
    model = proto(graph)
    del model.graph.input[1:]
    model.graph.initializer.append(numpy_helper.from_array(random.standard_normal((8, 8)).astype(np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    proofs = []
    for name, workers in (("here.onnx", None), ("there.onnx", address)):
        output, data = tmp_path / name, tmp_path / "x.npz"
        done = quantize(tmp_path / "m.onnx", data, output, timed=False, emulate=False, workers=workers)
        proofs.append(plain(done.proof.agreement))
    assert (tmp_path / "here.onnx").read_bytes() == (tmp_path / "there.onnx").read_bytes()
    assert proofs[0] == proofs[1]


def test_candidates_of_tune(pool: Workers, tmp_path: Path) -> None:
    target = resolve("auto")
    found = []
    for workers in (None, pool):
        folder = tmp_path / str(workers is None)
        job = open_job(demo.MODEL, Data(demo.CALIBRATION, count=8), Data(demo.VALIDATION, count=60), folder)
        (folder / "tune").mkdir()
        evaluator = LocalEvaluator(
            replace(job, workers=workers, task=make_task("classification")), target, folder / "tune"
        )
        candidates = kernel_candidates(target.profile, static=True, dynamic=False)[:2]
        first = evaluator.assess(candidates, 20)
        found.append(plain([first, evaluator.assess(candidates[:1], 60)]))
    assert found[0] == found[1]


def evaluated(task: Task | None, samples: Samples, *parts: range) -> object:
    with open_model(demo.MODEL, ONE) as a, open_model(demo.MODEL, ONE) as b:
        sessions = {"a": a.session, "b": b.session}
        listed = list(samples)
        whole = RunningEvaluation(("a", "b"), task, "a")
        for part in parts:
            one = RunningEvaluation(("a", "b"), task, "a")
            for place in part:
                one.update(listed[place], {name: infer(s, listed[place]) for name, s in sessions.items()})
            whole.take(one.collected())
        return plain(whole.result({}).agreement), plain(whole.result({}).accuracy)


def test_shards_of_any_size_give_the_same_figures() -> None:
    task, samples = make_task("classification"), demo_samples(30)
    whole = evaluated(task, samples, range(30))
    assert evaluated(task, samples, range(1), range(1, 19), range(19, 30)) == whole


def test_parts_of_samples_are_the_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(33, dtype=np.float32).reshape(11, 3))
    signature = model_signature(linear(tmp_path, batch=4))
    samples = open_samples(tmp_path / "x.npz", signature, start=1)
    whole = list(samples)
    assert len(whole) == len(samples) == 3
    parts = [part for stop in (1, 2, 3) for part in samples.part(stop - 1, stop)]  # type: ignore[attr-defined]
    assert [p.context for p in parts] == [s.context for s in whole]
    for part, sample in zip(parts, whole, strict=True):
        assert np.array_equal(part.inputs["x"], sample.inputs["x"])


def linear(folder: Path, *, batch: int) -> Path:
    model = linear_model(1.0)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    onnx.save(model, folder / "fixed.onnx")
    return folder / "fixed.onnx"


def test_no_workers_for_a_trial() -> None:
    done = run("eval", demo.MODEL, "--data", demo.VALIDATION, "--try-preprocess", "--workers", "2")
    assert done.exit_code == UsageError.exit_code
