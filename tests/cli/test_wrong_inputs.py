"""Test wrong inputs: one line names the file and the solution, the exit code is documented, and no file changes."""

from __future__ import annotations

import click
import pytest

from edgeq.errors import (
    CalibrationError,
    CheckFailedError,
    DataError,
    HardwareError,
    ModelError,
    UsageError,
)
from edgeq.util.process import ends_in_one_line
from tests.cli.workspace import Workspace

MODEL, DATA, USAGE = ModelError.exit_code, DataError.exit_code, UsageError.exit_code
GOOD = ("net.onnx", "--data", "x.npz")
QUICK = ("--no-timing", "-o", "int8.onnx")
# An output that every command accepts.
ANY = ("--no-timing", "-o", "out")
TARGET = {"quantize": "--profile", "package": "--target"}


@pytest.mark.parametrize("command", ["quantize", "package", "calibrate"])
@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("absent.onnx", "absent.onnx does not exist"),
        ("empty", "empty is a directory, not a model"),
        ("empty.onnx", "empty.onnx is empty"),
        ("text.onnx", "text.onnx is not an ONNX model: it is a text file"),
        ("truncated.onnx", "truncated.onnx is not an ONNX model: it is damaged or truncated"),
        ("images/0.png", "images/0.png is not an ONNX model: it is a PNG image"),
        ("opset5.onnx", "opset5.onnx uses opset 5"),
    ],
)
def test_models(workspace: Workspace, command: str, model: str, says: str) -> None:
    workspace.refused(MODEL, command, model, "--data", "x.npz", "-o", "out", says=says)


@pytest.mark.parametrize("command", ["inspect", "bench"])
@pytest.mark.parametrize("model", ["absent.onnx", "text.onnx", "truncated.onnx"])
def test_models_of_commands_that_only_read(workspace: Workspace, command: str, model: str) -> None:
    workspace.refused(MODEL, command, model, says=model)


@pytest.mark.parametrize(
    ("model", "data", "says"),
    [
        ("unsupported", "x", "unsupported.onnx: nothing in it was quantized. Deploy the float model; Erf (erf)"),
        ("relu", "x", "relu.onnx: nothing in it was quantized. Deploy the float model; Relu (relu)"),
        ("integers", "tokens", "integers.onnx computes nothing in float"),
        ("inputless", "x", "inputless.onnx has no inputs"),
    ],
)
def test_models_with_nothing_to_quantize(workspace: Workspace, model: str, data: str, says: str) -> None:
    workspace.refused(MODEL, "quantize", f"{model}.onnx", "--data", f"{data}.npz", *ANY, says=says)
    workspace.refused(MODEL, "package", f"{model}.onnx", "--data", f"{data}.npz", *ANY, says=says)


@pytest.mark.parametrize("op_type", ["LSTM", "MatMul"])
def test_dynamic_with_nothing_of_that_type(workspace: Workspace, op_type: str) -> None:
    options = ("--dynamic", "--op-type", op_type, "--weight-type", "int8")
    workspace.refused(MODEL, "quantize", "unsupported.onnx", "--data", "x.npz", *options, *QUICK, says="nothing in it")


def test_a_quantized_model_is_not_quantized_again(workspace: Workspace) -> None:
    assert workspace.run("quantize", *GOOD, *QUICK).code == 0
    ran = workspace.refused(
        MODEL, "quantize", "int8.onnx", "--data", "x.npz", "-o", "twice.onnx", says="quantized already"
    )
    assert "float32 model" in ran.line


@pytest.mark.parametrize("command", ["quantize", "package", "calibrate"])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("absent.npz", "absent.npz does not exist"),
        ("absent_*.npz", "absent_*.npz matches no file"),
        ("empty", "empty holds no samples"),
        ("notes.txt", "notes.txt is text"),
        ("wrong_name.npz", "wrong_name.npz has no array for the model input 'x' (it holds z"),
        ("wrong_shape.npz", "input 'x' has shape [4, 2, 8, 8], the model takes x: float32[1, 3, 8, 8]"),
        ("nan.npz", "nan.npz[2]: input 'x' holds NaN"),
        ("integers.npz", "integers.npz[0]: input 'x' is int64, the model takes float32"),
        ("words.npz", "words.npz"),
        ("none.npz", "none.npz holds an empty array"),
        ("pickled.npz", "pickled.npz holds pickled Python objects, which are never loaded"),
        ("truncated.npz", "truncated.npz cannot be read"),
        ("images", "images holds images, no preprocessing is named"),
    ],
)
def test_data(workspace: Workspace, command: str, data: str, says: str) -> None:
    workspace.refused(DATA, command, "net.onnx", "--data", data, "-o", "out", says=says)


def test_an_unreadable_image(workspace: Workspace) -> None:
    options = ("--data", "bad_images", "--preprocess", "divide=255,layout=NCHW")
    workspace.refused(
        DATA, "quantize", "net.onnx", *options, *QUICK, says="bad_images/2.png is not an image that can be"
    )


def test_an_unknown_preprocessing(workspace: Workspace) -> None:
    options = ("--data", "images", "--preprocess", "imagnet")
    workspace.refused(DATA, "quantize", "net.onnx", *options, *QUICK, says="no preprocessing is called 'imagnet'")


def test_one_of_two_inputs_is_missing(workspace: Workspace) -> None:
    says = "half_a_pair.npz has no array for the model input 'b'"
    workspace.refused(DATA, "quantize", "pair.onnx", "--data", "half_a_pair.npz", *QUICK, says=says)


def test_inputs_that_the_runtime_refuses_are_one_line(workspace: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("tokens.onnx", "--data", "tokens_out_of_range.npz")
    ran = workspace.refused(DATA, "quantize", *options, *QUICK, says="tokens_out_of_range.npz[")
    assert "out of data bounds" in ran.line
    assert capfd.readouterr().err == "", "ONNX Runtime's own log does not reach the terminal"


def test_a_question_keeps_its_mark(capsys: pytest.CaptureFixture[str]) -> None:
    context = click.Context(click.Command("bench"), info_name="edgeq bench")
    with pytest.raises(SystemExit), ends_in_one_line():
        raise click.UsageError("No such option '--pim'. Did you mean '--pin'?", context)
    assert capsys.readouterr().err.endswith("Did you mean '--pin'? See `edgeq bench --help`\n")


@pytest.mark.parametrize("command", ["eval", "quantize", "package", "tune", "calibrate"])
@pytest.mark.parametrize("number", ["0", "-1", "many", "99999", "tcp://"])
def test_workers_are_checked_before_anything_is_read(workspace: Workspace, command: str, number: str) -> None:
    output = () if command == "eval" else ("-o", "out")
    says = f"'--workers': '{number}' is neither a number of workers, from 1 to 4096, nor an address"
    workspace.refused(USAGE, command, "absent.onnx", "--data", "absent.npz", *output, "--workers", number, says=says)


@pytest.mark.parametrize("command", ["quantize", "package"])
@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--task", "classification"), USAGE, "--task needs labelled samples. Give them with --val"),
        (("--task", "classification", "--val", "x.npz"), DATA, "x.npz[0] has no label. Give --labels"),
        (("--task", "clasification", "--val", "x.npz"), USAGE, "unknown task 'clasification'"),
        (("--task", "detection", "--val", "x.npz"), USAGE, "detection needs annotations"),
        (("--task", "classification", "--val", "x.npz", "--labels", "absent.csv"), DATA, "absent.csv does not exist"),
        (("--val", "absent.npz"), DATA, "absent.npz does not exist"),
        (("--exclude", "convv"), USAGE, "net.onnx: no node is named 'convv'. Did you mean conv?"),
        (("--exclude", "zzz"), USAGE, "List the node names with `edgeq inspect -v`"),
        (("--op-type", "Covn"), USAGE, "no operator 'Covn' has an int8 form on the cpu backend. Did you mean Conv"),
        (("--decoder", "yolox", "--val", "x.npz"), USAGE, "task options without a task. Give a --task"),
        (("--labels", "absent.csv"), USAGE, "--labels needs --val, whose labels it names. Give --val"),
        (("--max-drop", "1pt"), USAGE, "needs labels"),
        (("--max-drop", "much"), USAGE, "--max-drop 'much' is not a number"),
        (("--require-coverage", "200%"), USAGE, "--require-coverage '200%' is not between 0 and 1"),
        (("--percentile", "99"), USAGE, "--percentile needs --method percentile"),
        (("--method", "percentile", "--percentile", "199"), USAGE, "199.0 is not in the range"),
        (
            ("--method", "percentile", "--percentile", "99", "--method-option", "percentile=98"),
            USAGE,
            "an option of the method is given twice",
        ),
        (("--weight-only", "8", "--eight-bit", "conv"), USAGE, "--eight-bit needs --weight-only 4"),
        (("--method", "median"), USAGE, "'median' is not one of"),
        (("--activation-type", "int8", "--weight-type", "uint8"), USAGE, "int8 activations with uint8 weights"),
        (("--dynamic", "--method", "mse"), USAGE, "--method and --dynamic exclude each other"),
        (("--dynamic", "--format", "QDQ"), USAGE, "--format and --dynamic exclude each other"),
        (("--weight-only", "4", "--method", "mse"), USAGE, "--method and --weight-only exclude each other"),
        (("--weight-only", "4", "--per-channel"), USAGE, "--per-channel and --weight-only exclude each other"),
        (("--dynamic", "--weight-type", "uint8"), USAGE, "Name the types with --op-type"),
        (("--dynamic", "--op-type", "Conv"), USAGE, "no weight type for dynamic Conv. Name one with --weight-type"),
        (("--count", "0"), USAGE, "'--count': 0 is not in the range x>=1. See `edgeq "),
        (("--calibration", "absent"), CalibrationError.exit_code, "absent contains no calibration statistics"),
        (("--calibration", "empty"), CalibrationError.exit_code, "empty contains no calibration statistics"),
        (("--frobnicate",), USAGE, "No such option '--frobnicate'"),
    ],
)
def test_options(workspace: Workspace, command: str, options: tuple[str, ...], code: int, says: str) -> None:
    workspace.refused(code, command, *GOOD, *ANY, *options, says=says)


def test_the_data_of_a_static_scheme_are_not_optional(workspace: Workspace) -> None:
    workspace.refused(
        USAGE, "quantize", "net.onnx", *QUICK, says="no samples to prove the result on. Give --data or --val"
    )
    options = ("--val", "x.npz")
    workspace.refused(USAGE, "quantize", "net.onnx", *QUICK, *options, says="Give --data or --statistics")


@pytest.mark.parametrize("command", ["quantize", "package"])
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nope", "unknown target or profile 'nope'"),
        ("rasberry-pi-4", "Did you mean raspberry-pi-4?"),
        ("absent.toml", "absent.toml cannot be read: No such file or directory"),
    ],
)
def test_targets(workspace: Workspace, command: str, target: str, says: str) -> None:
    """A wrong target is refused before any data are opened."""
    ran = workspace.refused(HardwareError.exit_code, command, *GOOD, *ANY, TARGET[command], target, says=says)
    assert "preprocessing" not in ran.err, "the data were opened for nothing"


def test_a_target_of_another_architecture_is_built_and_says_where_it_was_checked(workspace: Workspace) -> None:
    ran = workspace.run("quantize", *GOOD, *QUICK, "--profile", "raspberry-pi-4", "--json")
    assert ran.code == 0
    found = ran.json()
    assert (found["target"], found["scheme"]["activation_type"]) == ("raspberry-pi-4", "int8")
    assert found["native"] is False
    assert any("not those of raspberry-pi-4" in note for note in found["notes"])


def test_a_calibration_of_another_model(workspace: Workspace) -> None:
    assert workspace.run("calibrate", "matmul.onnx", "--data", "rows.npz", "-o", "stats").code == 0
    options = ("--calibration", "stats", "--val", "x.npz")
    workspace.refused(CalibrationError.exit_code, "quantize", "net.onnx", *options, *QUICK, says="stats")


def test_a_bar_that_is_not_met_leaves_no_output(workspace: Workspace) -> None:
    options = ("--exclude", "conv", "--require-coverage", "95%")
    ran = workspace.refused(
        CheckFailedError.exit_code, "quantize", *GOOD, *QUICK, *options, says="less than the 95.0% required"
    )
    assert "the largest operator in float is conv (kept in float on request)" in ran.line
    workspace.refused(
        CheckFailedError.exit_code, "package", *GOOD, "-o", "bundle", *options, says="less than the 95.0%"
    )


@pytest.mark.parametrize(
    ("model", "data", "options"),
    [
        ("opset8", "x", ()),
        ("dynamic", "x", ()),
        ("matmul", "rows", ()),
        ("matmul", "rows", ("--dynamic",)),
        ("batches", "rows", ()),
        ("pair", "pair", ()),
        ("tokens", "tokens", ()),
        ("tokens", "tokens", ("--dynamic",)),
        ("branch", "rows", ()),
        ("loop", "rows", ()),
        ("net", "x", ("--dynamic", "--op-type", "Conv", "--weight-type", "uint8")),
    ],
)
def test_unusual_models_that_work(workspace: Workspace, model: str, data: str, options: tuple[str, ...]) -> None:
    ran = workspace.run("quantize", f"{model}.onnx", "--data", f"{data}.npz", *QUICK, "--json", *options)
    assert ran.code == 0, ran.err
    found = ran.json()
    assert found["agreement"]["sqnr_db"] > 30
    assert 0 < found["coverage"]["int8_mac_share"] <= 1
    assert all(node["reason"] for node in found["coverage"]["float_nodes"])
    assert set(ran.after) - set(ran.before) == {"int8.onnx"}, "nothing else is left in the working directory"


def test_an_unusual_name_is_a_name(workspace: Workspace) -> None:
    (workspace.path / "net.onnx").rename(workspace.path / "we ird [näme].onnx")
    ran = workspace.run("package", "we ird [näme].onnx", "--data", "x.npz", "-o", "a [bundle]", "--no-timing", "--json")
    assert ran.code == 0, ran.err
    assert workspace.run("verify", "a [bundle]").code == 0


@pytest.mark.parametrize("threads", ["-1", "100000"])
@pytest.mark.parametrize("command", [("bench", "net.onnx"), ("eval", *GOOD, "--reference", "net.onnx")])
def test_threads(workspace: Workspace, command: tuple[str, ...], threads: str) -> None:
    workspace.refused(USAGE, *command, "--threads", threads, says="0<=x<=1024")
