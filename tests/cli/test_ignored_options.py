"""Test that an option without any effect is refused in one line, not ignored."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from edgeq_device.cli import main

from edgeq import demo
from edgeq.data.open_source import Data
from edgeq.jobs.package import package
from tests.cli.workspace import Workspace

OPTION = ("--session-option", "session.disable_prepacking=1")
QUICK = ("--duration", "0", "--queries", "1")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bundle") / "bundle"
    package(demo.MODEL, Data(demo.CALIBRATION, count=4), place, timed=False)
    return place


@pytest.mark.parametrize("option", [("--qps", "5"), ("--latency-bound", "3"), ("--batch", "4")], ids=lambda o: o[0])
def test_bench_takes_no_option_of_another_scenario(workspace: Workspace, option: tuple[str, str]) -> None:
    line = f"{option[0]} has no effect in the single-stream scenario. Leave it out, or choose --scenario"
    workspace.refused(2, "bench", "net.onnx", *option, *QUICK, says=line)


def test_nor_does_the_runner(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--bundle", str(bundle), "--qps", "5", *QUICK]) == 2
    line = "--qps has no effect in the single-stream scenario. Leave it out, or choose --scenario server\n"
    assert capsys.readouterr().err.endswith(line)


def test_defaults_are_no_options_of_another_scenario(workspace: Workspace) -> None:
    assert workspace.run("bench", "net.onnx", "--batch", "1", *QUICK).code == 0


@pytest.mark.parametrize("command", ["quantize", "eval", "eval --output"])
def test_a_task_looks_at_the_output_that_is_named(workspace: Workspace, command: str) -> None:
    two = onnx.load("net.onnx")
    two.graph.output.append(onnx.ValueInfoProto(name="f"))
    onnx.save(onnx.shape_inference.infer_shapes(two), "two.onnx")
    name, _, option = command.partition(" ")
    given = ("--data", "labelled.npz", "--preprocess", "key=x,label=y", "--task", "classification")
    how = (*given, "--val", "labelled.npz", "--no-timing", "-o", "int8.onnx") if name == "quantize" else given
    says = "the model's outputs are f, y. Choose one with --task-output NAME"
    workspace.refused(2, name, "two.onnx", *how, says=says)
    ran = workspace.run(name, "two.onnx", *how, option or "--task-output", "y", "--json")
    assert ran.code == 0, ran.err
    assert "top1" in ran.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "BUNDLE", "--data", str(demo.VALIDATION), "--task", "classification", "--optimization", "none"),
        ("eval", "BUNDLE", "--data", str(demo.VALIDATION), "--task", "classification", *OPTION),
        ("eval", "BUNDLE", "--data", str(demo.VALIDATION), "--reference", "BUNDLE", *OPTION),
        ("bench", "BUNDLE", *OPTION),
        ("compare", "BUNDLE", "BUNDLE", "--no-timing", *OPTION),
        ("debug", str(demo.MODEL), "BUNDLE", "--data", str(demo.CALIBRATION), *OPTION),
        ("audit", "BUNDLE", *OPTION),
    ],
    ids=lambda a: " ".join(word for word in a if not word.startswith(("/", "session."))),
)
def test_a_bundle_brings_its_own(workspace: Workspace, bundle: Path, arguments: tuple[str, ...]) -> None:
    words = [str(bundle) if word == "BUNDLE" else word for word in arguments]
    named = "--session-option" if "--session-option" in words else "--optimization"
    line = f"whose variants bring their session options and optimisation level. Leave {named} out"
    workspace.refused(2, *words, says=line)


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "BUNDLE", "--data", str(demo.VALIDATION), "--count", "4", "--task", "classification"),
        ("eval", "BUNDLE", "--data", str(demo.VALIDATION), "--count", "4", "--reference", str(demo.MODEL), *OPTION),
        ("compare", str(demo.MODEL), "BUNDLE", "--no-timing", *OPTION),
    ],
    ids=["a default", "for the reference", "for one of two"],
)
def test_bundles_accept_the_options_of_models(workspace: Workspace, bundle: Path, arguments: tuple[str, ...]) -> None:
    ran = workspace.run(*(str(bundle) if word == "BUNDLE" else word for word in arguments))
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    "command", ["bench net.onnx", "compare net.onnx net.onnx", "gate net.onnx --baseline net.onnx"]
)
@pytest.mark.parametrize("option", [("--preprocess", "imagenet"), ("--count", "3"), ("--labels", "labels.csv")])
def test_refuses_options_of_samples_without_samples(
    workspace: Workspace, command: str, option: tuple[str, str]
) -> None:
    if option[0] == "--labels" and command.startswith("bench"):
        return  # bench has no such option
    says = f"{option[0]} is about samples. Give them with --data, or leave it out"
    workspace.refused(2, *command.split(), *option, says=says)


def test_shapes_of_inputs_that_samples_give(workspace: Workspace) -> None:
    options = ("--data", "x.npz", "--shape", "x=1,3,8,8")
    workspace.refused(2, "bench", "dynamic.onnx", *options, says="--shape is only for made-up inputs")


def test_a_bound_of_no_number(workspace: Workspace) -> None:
    arguments = ("net.onnx", "--data", "x.npz", "-o", "out.onnx", "--min-sqnr", "nan")
    workspace.refused(2, "quantize", *arguments, says="--min-sqnr nan is not a number of decibels")


def test_a_bundle_is_named_as_one_where_a_model_is_wanted(workspace: Workspace, bundle: Path) -> None:
    workspace.refused(3, "inspect", bundle, says="is a bundle, not a model. Give the .onnx file in it; `edgeq verify`")
    Path("b.edgeq").write_bytes(b"PK\x03\x04")
    workspace.refused(3, "inspect", "b.edgeq", says="is not an ONNX model: it has the suffix of a bundle")


def test_refuses_a_count_without_data(workspace: Workspace) -> None:
    assert workspace.run("calibrate", "net.onnx", "--data", "x.npz", "-o", "stats").code == 0
    given = ("net.onnx", "--calibration", "stats", "--val", "x.npz", "-o", "out")
    for command in ("quantize", "package", "tune"):
        workspace.refused(2, command, *given, "--count", "2", says="--count needs --data, whose samples it limits")


def test_a_self_test_of_more_samples_than_there_are(workspace: Workspace) -> None:
    given = ("net.onnx", "--data", "x.npz", "--count", "3", "--no-timing", "-o", "out")
    ran = workspace.run("package", *given, "--selftest", "9")
    assert ran.code == 0
    assert "the self-test has 3 samples, not 9: there are no more" in ran.err


def test_a_report_of_a_variant_that_is_not_timed(workspace: Workspace, bundle: Path) -> None:
    workspace.refused(2, "report", bundle, "--variant", "other", "-o", "r.html", says="--variant needs --bench")
