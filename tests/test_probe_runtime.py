"""Test that scripts/probe_runtime.py tells right outputs from wrong ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


def test_the_installed_release_is_right_and_a_wrong_answer_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    import probe_answers
    import probe_runtime

    monkeypatch.setattr(probe_answers, "_INTEGER", ("QLinearConv",))
    monkeypatch.setattr(probe_answers, "_CONVOLUTIONS", ((3, 8, 4, 3, 2, 1), (4, 4, 4, 3, 1, 4)))
    probe_answers.write_answers(tmp_path)
    found = probe_runtime.load_all(tmp_path)
    assert {name: wrong for name, wrong in found.items() if name and wrong and "extreme" not in name} == {}
    answers = tmp_path / "answer QLinearConv u8s8.npz"
    with np.load(answers) as file:
        arrays = dict(file)
    arrays["y1"][0, 0, 0, 0] ^= 1
    np.savez(answers, **arrays)
    found = probe_runtime.load_all(tmp_path)
    assert found["answer QLinearConv u8s8"] == ["1x4x4x4"]
    table = probe_runtime.as_toml([("x86_64", {**found, "opset 1": True, "ir 1": True})])
    assert "wrong answer QLinearConv u8s8: 1x4x4x4" in table


def test_each_entry_of_the_table_is_tried_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    import probe_runtime
    from edgeq_device.engines.catalog import load_wrong_kernels
    from edgeq_device.system import features

    sources = [row.source.rpartition("/")[2] for row in load_wrong_kernels()]

    def judged(architecture: str, present: set[str], *runs: dict[str, object]) -> dict[str, str]:
        monkeypatch.setattr(features, "read_features", lambda: (architecture, frozenset(present)))
        lines = (line.partition(": ") for line in probe_runtime.judge_entries(list(runs)))
        return {source.rpartition("/")[2]: verdict for source, _, verdict in lines}

    conv = "answer Conv f32 with uneven padding"
    old, new = {"": "1.27.0", conv: ["1x16x10x12"]}, {"": "1.28.0", conv: []}
    assert list(judged("arm64", {"sme", "asimddp"}, old)) == sources
    assert judged("arm64", {"sme"}, old)["31569"] == "still wrong (1.27.0 wrong)"
    assert judged("arm64", {"sme"}, new, old)["31569"] == "mended in 1.28.0 (1.27.0 wrong, 1.28.0 right)"
    assert judged("arm64", {"sme"}, {**new, "": "1.27.0"})["31569"].endswith("`before` is wrong for 1.27.0")
    assert judged("arm64", {"asimddp"}, new)["31573"] == "cannot be tried here: needs a CPU without asimddp"
    assert judged("x86_64", set(), new)["26324"] == "cannot be tried here: needs amx_int8"
