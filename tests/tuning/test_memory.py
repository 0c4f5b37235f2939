"""Test the findings of earlier runs: which models use them, what they leave out, and that all are measured again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from edgeq.model.convert import from_proto
from edgeq.run.engines import EngineChoice, load_engines
from edgeq.scheme import Scheme
from edgeq.tuning.engines import Field
from edgeq.tuning.evaluator import CandidateEvaluator
from edgeq.tuning.goal import Goal
from edgeq.tuning.memory import FILE, Memory, Space, layer_kinds, recall
from edgeq.tuning.search import Searched, Searches
from edgeq.tuning.space import Candidate
from edgeq.tuning.verdict import describe_verdict
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import plain
from tests.graphs import proto
from tests.tuning.fakes import Fact, FakeEvaluator, Notes, profile

SETTINGS: dict[str, Any] = {"machine": "m", "version": {"onnxruntime": "1.32.0"}, "objective": "latency"}


def net(first: str, weight: tuple[int, ...]) -> ir.Model:
    """Return x → a 3 x 3 convolution → a pointwise one."""
    made = proto(f"""g (float[1,4,8,8] x) => (float[1,4,8,8] z) {{
        [a] y = Conv<{first}pads = [1,1,1,1]>(x, w) [b] z = Conv(y, v)
    }}""")
    for name, shape in {"w": weight, "v": (4, 4, 1, 1)}.items():
        made.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    return from_proto(onnx.shape_inference.infer_shapes(made))


DENSE = net("", (4, 4, 3, 3))
SEPARABLE = net("group = 4, ", (4, 1, 3, 3))
CHOICES = (
    Candidate("own choice", Scheme()),
    Candidate("signed", Scheme(activation_type="int8")),
    Candidate("coarse", Scheme(per_channel=False)),
    Candidate("seven bits", Scheme(reduce_range=True)),
)
FACTS = {"own": Fact(speed=2), "signed": Fact(speed=1.5), "coarse": Fact(speed=4), "seven": Fact(speed=1.2)}


def found(
    evaluator: CandidateEvaluator, memory: Memory, space: Space | None = None, *, progress: Progress = SILENT
) -> Searched:
    space = space or Space(CHOICES, profile(method=("entropy", "mse")), Field())
    return Searches(evaluator, Goal(), (0,), tuple, progress).best(space, memory, None)


def tuned_before(path: Path, facts: dict[str, Fact] = FACTS, *, digest: str = "first") -> None:
    memory = recall(path, DENSE, SETTINGS, 0.01, SILENT)
    memory.remember("first.onnx", digest, found(FakeEvaluator(facts), Memory()).outcome, SILENT)


def test_a_model_like_it_begins_with_what_won(tmp_path: Path) -> None:
    tuned_before(tmp_path / FILE)
    evaluator = FakeEvaluator(FACTS)
    result = found(evaluator, recall(tmp_path / FILE, DENSE, SETTINGS, 0.01, SILENT))
    assert result.outcome.winner is not None
    assert not result.outcome.winner.candidate.scheme.per_channel
    assert result.memory == {"models": ["first.onnx"], "confirmed": True}
    whole = FakeEvaluator(FACTS)
    assert found(whole, Memory()).memory == {}
    assert len(evaluator.log) < len(whole.log)
    assert not any("signed" in line or "seven" in line for line in evaluator.log)
    assert any(line == "build own choice" for line in evaluator.log), "never without a rival"


@pytest.mark.parametrize(
    "here",
    [FACTS | {"coarse": Fact(speed=3.2)}, FACTS | {"coarse": Fact(speed=4, loss=0.2)}],
    ids=["slower than promised", "loses too much"],
)
def test_refuted_memories_are_followed_by_the_whole_search(tmp_path: Path, here: dict[str, Fact]) -> None:
    tuned_before(tmp_path / FILE)
    evaluator = FakeEvaluator(here | {"signed": Fact(speed=3.9)})
    result = found(evaluator, recall(tmp_path / FILE, DENSE, SETTINGS, 0.01, SILENT))
    assert result.memory == {"models": ["first.onnx"], "confirmed": False}
    assert result.outcome.winner is not None
    assert result.outcome.winner.candidate.scheme.activation_type == "int8"


def test_on_a_busy_machine_it_is_not_refuted_but_cannot_be_confirmed(tmp_path: Path) -> None:
    tuned_before(tmp_path / FILE)
    notes = Notes()
    memory = recall(tmp_path / FILE, DENSE, SETTINGS, 0.01, SILENT)
    result = found(FakeEvaluator(FACTS, busy="the machine was busy"), memory, progress=notes)
    why = "the machine was busy"
    assert result.memory == {"models": ["first.onnx"], "confirmed": None, "reason": why}
    assert f"it could not be confirmed here: {why}; the whole search follows" in notes.texts
    assert not [text for text in notes.texts if "as well here" in text]


def test_losses_refute_a_memory_on_a_busy_machine(tmp_path: Path) -> None:
    tuned_before(tmp_path / FILE)
    memory = recall(tmp_path / FILE, DENSE, SETTINGS, 0.01, SILENT)
    lossy = {name: replace(fact, loss=0.2) for name, fact in FACTS.items()}
    result = found(FakeEvaluator(lossy, busy="the machine was busy"), memory)
    assert result.memory == {"models": ["first.onnx"], "confirmed": False}


def test_engines_and_methods_that_did_not_win_are_left_out(tmp_path: Path) -> None:
    tuned_before(tmp_path / FILE)
    known = load_engines()
    field = Field(tuple(EngineChoice(engine, "f32") for engine in known.values() if engine.module))
    space = Space(CHOICES, profile(method=("entropy", "mse", "minmax")), field)
    narrow = recall(tmp_path / FILE, DENSE, SETTINGS, 0.01, SILENT).narrow(space)
    assert narrow is not None
    assert narrow.field.plugins == ()
    assert [c.name for c in narrow.candidates] == ["coarse", "own choice"]
    assert set(narrow.profile.search["method"]) <= {"minmax", "entropy", "mse"}


def test_other_models_machines_and_versions_know_nothing_of_it(tmp_path: Path) -> None:
    tuned_before(tmp_path / FILE)
    assert recall(tmp_path / FILE, DENSE, SETTINGS, 0.01, SILENT).evidence
    assert not recall(tmp_path / FILE, SEPARABLE, SETTINGS, 0.01, SILENT).evidence
    for change in ({"machine": "n"}, {"version": {"onnxruntime": "1.33.0"}}, {"objective": "size"}):
        assert not recall(tmp_path / FILE, DENSE, SETTINGS | change, 0.01, SILENT).evidence
    assert not recall(tmp_path / "none" / FILE, DENSE, SETTINGS, 0.01, SILENT).evidence


def test_winners_under_a_stricter_goal_are_not_recalled(tmp_path: Path) -> None:
    tuned_before(tmp_path / FILE)
    assert recall(tmp_path / FILE, DENSE, SETTINGS, 0.005, SILENT).evidence
    assert not recall(tmp_path / FILE, DENSE, SETTINGS, 0.02, SILENT).evidence


def test_runs_out_of_time_are_not_remembered(tmp_path: Path) -> None:
    memory = recall(tmp_path / FILE, DENSE, SETTINGS, 0.01, SILENT)
    outcome = found(FakeEvaluator(FACTS), Memory()).outcome
    memory.remember("first.onnx", "first", replace(outcome, out_of_time=True), SILENT)
    assert not recall(tmp_path / FILE, DENSE, SETTINGS, 0.01, SILENT).evidence


def test_kinds_of_layers() -> None:
    assert layer_kinds(DENSE) == {"Conv": 0.9, "Conv, pointwise": 0.1}
    assert set(layer_kinds(SEPARABLE)) == {"Conv, grouped", "Conv, pointwise"}


def test_one_entry_a_model_and_no_names_of_layers(tmp_path: Path) -> None:
    for _ in range(2):
        tuned_before(tmp_path / FILE)
    tuned_before(tmp_path / FILE, digest="second")
    found = recall(tmp_path / FILE, DENSE, SETTINGS, 0.01, SILENT).evidence
    assert sorted(e.digest for e in found) == ["first", "second"]
    assert all(e.scheme.exclude == () for e in found)
    assert plain(found[0])["speedup"] == 4


@pytest.mark.parametrize("content", ["", "[]", '{"evidence": [{}]}', "[" * 100_000, '{"schema": "other"}'])
def test_a_damaged_file_is_no_evidence_and_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert not recall(tmp_path / FILE, DENSE, SETTINGS, 0.01, SILENT).evidence
    tuned_before(tmp_path / FILE)
    assert recall(tmp_path / FILE, DENSE, SETTINGS, 0.01, SILENT).evidence


def test_on_a_busy_machine_the_speed_of_an_earlier_run_of_the_same_model_is_named(tmp_path: Path) -> None:
    tuned_before(tmp_path / FILE)
    for digest, earlier in (("first", 4.0), ("other", None)):
        memory = recall(tmp_path / FILE, DENSE, {**SETTINGS, "model": digest}, 0.01, SILENT)
        outcome = found(FakeEvaluator(FACTS, busy="the machine was busy"), memory).outcome
        assert (outcome.chosen, outcome.earlier) == ("coarse", earlier)
        named = "an earlier run on this machine claimed 4.00 times for these kernels of this model"
        assert (named in " ".join(describe_verdict(outcome, Goal()))) == (earlier is not None)
