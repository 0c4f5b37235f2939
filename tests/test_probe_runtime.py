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
