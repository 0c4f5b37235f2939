"""Test how the facts of several sources become one."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq.describe.facts import Exported, Fact, ModelFacts, merge
from edgeq.describe.read import read_facts
from edgeq.errors import UsageError

NAMES = {"stride": "32", "names": "{0: 'cat', 1: 'traffic light'}", "task": "detect"}


def test_two_sources_that_agree_are_one(tmp_path: Path) -> None:
    (tmp_path / "coco.names").write_text("Cat\ntraffic_light\n")
    facts = read_facts(Exported(NAMES, tmp_path / "model.onnx"))
    assert facts.labels is not None
    assert [name.casefold() for name in facts.labels.value] == ["cat", "traffic_light"]


@pytest.mark.parametrize(("text", "difference"), [("cat\nbus\n", "number 1 is"), ("a\nb\nc\n", "3 and 2")])
def test_a_contradiction_names_both_sources_when_it_is_used(tmp_path: Path, text: str, difference: str) -> None:
    (tmp_path / "labels.txt").write_text(text)
    facts = read_facts(Exported(NAMES, tmp_path / "model.onnx"))
    assert facts.labels is not None
    with pytest.raises(UsageError) as caught:
        _ = facts.labels.value
    assert str(tmp_path / "labels.txt") in caught.value.problem
    assert "names in the model's metadata" in caught.value.problem
    assert difference in caught.value.problem
    assert "--classes" in str(caught.value) or "⟨classes⟩" in caught.value.text


def test_a_stated_preprocessing_replaces_an_assumed_one() -> None:
    assumed, stated = Fact("yolo", "the task", assumed=True), Fact({"steps": []}, "a file")
    for order in ((assumed, stated), (stated, assumed)):
        assert merge(ModelFacts(preprocess=fact) for fact in order).preprocess is stated


def test_thresholds_complete_each_other() -> None:
    parts = [ModelFacts(thresholds=Fact({"iou": 0.5}, "a")), ModelFacts(thresholds=Fact({"confidence": 0.1}, "b"))]
    merged = merge(parts).thresholds
    assert merged is not None
    assert merged.value == {"iou": 0.5, "confidence": 0.1}
    clash = merge([*parts, ModelFacts(thresholds=Fact({"iou": 0.6}, "c"))]).thresholds
    assert clash is not None
    with pytest.raises(UsageError, match="state different thresholds"):
        _ = clash.value
