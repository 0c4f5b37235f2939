"""Test what people see and type: -q, completion, options of other tools, errors as JSON, tables in a pipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgeq import demo
from edgeq.cli import group


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(group, [str(word) for word in words])


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (("quantize", "none.onnx", "--data", "x", "--json"), "ModelError", 3),
        (("quantize", "none.onnx", "--no-such-option", "--json"), "UsageError", 2),
        (("bench", "--json"), "UsageError", 2),
    ],
)
def test_an_error_is_an_object_with_json(words: tuple[str, ...], kind: str, code: int) -> None:
    done = run(*words)
    error = json.loads(done.stdout)["error"]
    assert (error["type"], error["exit_code"], done.exit_code) == (kind, code, code)
    assert error["problem"]
    assert error["fix"]


@pytest.mark.parametrize(("typed", "meant"), [("--calib", "--data"), ("--validation", "--val"), ("--out", "--output")])
def test_options_of_other_tools_are_answered(typed: str, meant: str) -> None:
    assert f"Did you mean '{meant}'?" in run("quantize", "m.onnx", typed, "x").stderr


@pytest.mark.parametrize(
    ("option", "begun", "name"),
    [
        ("--preprocess", "imagenet-r", "imagenet-resized"),
        ("--decoder", "yolox", "yolox"),
        ("--task", "class", "classification"),
        ("--recover", "seq", "sequential-correction"),
    ],
)
def test_the_shell_completes_names(option: str, begun: str, name: str) -> None:
    command = group.get_command(group.make_context("edgeq", [], resilient_parsing=True), "quantize")
    assert command is not None
    context = command.make_context("quantize", ["m.onnx"], resilient_parsing=True)
    parameter = next(one for one in command.params if option in one.opts)
    assert name in [item.value for item in parameter.shell_complete(context, begun)]


def test_tables_are_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = run("compare", demo.MODEL, demo.MODEL, "--data", demo.VALIDATION, "--count", "4", "--no-timing")
    assert "…" not in shown.stdout
    assert "B against A" in shown.stdout


def test_an_engine_that_is_named_twice_runs_once() -> None:
    words = ("--engine", "onnxruntime", "--engine", "onnxruntime", "--duration", "0.02", "--queries", "2", "--json")
    done = run("bench", demo.MODEL, *words)
    assert done.exit_code == 0, done.stderr
    assert len(json.loads(done.stdout)["models"]) == 1
