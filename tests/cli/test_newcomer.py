"""Test input from users who have not read the manual: near misses, older names, the next line, plain images."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner, Result
from onnx import numpy_helper
from PIL import Image

from edgeq.cli import COMMANDS, FILES, GROUPS, SHOWN, group
from edgeq.cli._next import next_line
from edgeq.hardware.target import load_targets
from tests.graphs import proto


def run(line: str) -> Result:
    return CliRunner().invoke(group, shlex.split(line), prog_name="edgeq")


def test_help_shows_about_ten_commands() -> None:
    lines = run("--help").output.splitlines()
    for title, names in SHOWN.items():
        assert lines[lines.index(f"{title}:") + 1].split()[0] == names[0]
    assert 10 <= sum(map(len, SHOWN.values())) <= 13


def test_every_command_is_shown_or_named() -> None:
    shown = {name for names in SHOWN.values() for name in names}
    inside = {name for group_name in GROUPS for name in FILES[group_name]}
    named = {word.strip(".,;`") for word in run("--help").output.partition("Start with")[2].split()}
    assert set(COMMANDS) - shown - inside - named == {"emulate"}  # listed as `device emulate`
    assert "emulate" in run("device --help").output


@pytest.mark.parametrize("line", [f"{name} {inner}" for name in GROUPS for inner in FILES[name]] + ["device emulate"])
def test_a_command_is_the_same_in_its_group(line: str) -> None:
    inside, alone = run(f"{line} --help"), run(f"{line.split()[1]} --help")
    assert inside.exit_code == alone.exit_code == 0
    assert inside.output.replace(line, line.split()[1]) == alone.output


def test_the_next_line_and_the_recipe_name_the_command_alone() -> None:
    assert run("info targets").stdout.endswith("next: edgeq targets show NAME --why\n")
    assert "[targets]" in run("info targets --print-recipe").stdout
    assert "[emulate.status]" in run("device emulate status --print-recipe").stdout


def test_without_an_output_it_lies_beside_the_model() -> None:
    for line, place in (
        ("quantize", "models/net.int8.onnx"),
        ("package", "models/net.edgeq"),
        ("tune", "models/net.edgeq"),
    ):
        command = group.get_command(click.Context(group), line)
        assert command is not None
        assert command.make_context(line, ["models/net.onnx"]).params["output"] == Path(place)


def test_many_options_are_shown_by_topic() -> None:
    text = run("quantize --help").output
    for title in ("Data:", "Quantization:", "Machine:", "Limits:", "Output:"):
        assert f"\n{title}\n" in text
    assert "\nData:\n" not in run("sign --help").output


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("quantise model.onnx", "Did you mean quantize?"),
        ("evaluat m.onnx", "Did you mean"),
        ("evaluate m.onnx", "Missing option '--data'"),
        ("bech m.onnx", "Did you mean bench?"),
        ("quantize m.onnx --taget x", "--target"),
        ("frobnicate", "See `edgeq --help`"),
        ("ship pulll", "Did you mean pull?"),
        ("info frobnicate", "See `edgeq info --help`"),
    ],
)
def test_near_misses(line: str, meant: str) -> None:
    result = run(line)
    assert result.exit_code == 2
    assert meant in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "name", "before"),
    [("quantize", "--target", "--profile"), ("retarget", "-t", "--profile"), ("verify", "--count", "--samples")],
)
def test_an_older_name_works_and_is_not_shown(command: str, name: str, before: str) -> None:
    found = group.get_command(click.Context(group), command)
    assert found is not None
    option = next(p for p in found.params if name in p.opts)
    assert before in option.opts
    text = run(f"{command} --help").output
    assert name in text
    assert before not in text


def test_targets_are_completed_by_part() -> None:
    completer = BashComplete(group, {}, "edgeq", "_EDGEQ_COMPLETE")
    found = {item.value for item in completer.get_completions(["quantize", "m.onnx", "-t"], "pi-")}
    assert {"raspberry-pi-4", "raspberry-pi-5"} <= found <= {name for name in load_targets() if "pi-" in name}
    assert "x86-64-avx2" in {item.value for item in completer.get_completions(["targets", "show"], "avx2")}


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("quantize m.onnx --data d -o o.onnx", "edgeq bench o.onnx --against m.onnx --data d"),
        ("quantize m.onnx --calibration c --val v -o o.onnx", "edgeq bench o.onnx --against m.onnx"),
        (
            "quantize m.onnx --data d --preprocess tf -t gemmini -o o.onnx",
            "edgeq package m.onnx -t gemmini -o BUNDLE --data d --preprocess tf",
        ),
        (
            "quantize m.onnx --data d --no-per-channel --exclude a --exclude 'b c' -t pi.toml -o o --force",
            "edgeq package m.onnx -t pi.toml -o BUNDLE --data d --no-per-channel --exclude a --exclude 'b c'",
        ),
        ("tune m.onnx --data d --force --dry-run -o b", "edgeq tune m.onnx -o b --data d --force"),
        ("eval m.onnx --data d --preprocess tf", "edgeq compare FLOAT.onnx m.onnx --data d --preprocess tf"),
        (
            "eval m.onnx --data '{model}/x' --labels 'name:{label}_*' --task classification",
            "edgeq compare FLOAT.onnx m.onnx --data '{model}/x' --task classification --labels 'name:{label}_*'",
        ),
        ("verify b --variant v", "edgeq bench b --variant v"),
        ("verify b --variant v --on all", "edgeq report b --variant v --open"),
        (
            "bench m.onnx --data d --preprocess tf --threads 2 --on pi",
            "edgeq eval m.onnx --data LABELLED --task classification --threads 2 --preprocess tf --on pi",
        ),
        ("bench m.onnx --on pi --on tx2", "edgeq eval m.onnx --data LABELLED --task classification"),
    ],
)
def test_the_next_line_fits_what_was_typed(line: str, typed: str) -> None:
    name, *words = shlex.split(line)
    parent = click.Context(group, info_name="edgeq")
    command = group.get_command(parent, name)  # type: ignore[attr-defined]
    assert next_line(command.make_context(name, words, parent=parent)) == typed


def test_the_next_line_is_for_people() -> None:
    assert run("preprocess show tf").stdout.endswith(
        "next: edgeq quantize MODEL.onnx --data IMAGES --preprocess tf -o int8.onnx\n"
    )
    assert "next:" not in run("preprocess show tf -q").stdout
    assert "next:" not in run("preprocess show tf --json").stdout
    assert run("targets").stdout.endswith("next: edgeq targets show NAME --why\n")


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """Write red and blue images, and a model that tells them apart only if its inputs are between -1 and 1."""
    for index in range(4):
        pixels = np.full((8, 8, 3), 128, np.uint8)
        pixels[..., 0 if index % 2 else 2] = 255
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{index}.png")
    model = proto(
        """g (float[1, 3, 8, 8] x) => (float[1, 2] y) <int64[2] s = {1, 3}> {
            m = GlobalAveragePool (x)
            f = Reshape (m, s)
            c = Clip (f, low0, high0)
            d = Sub (f, c)
            e = Abs (d)
            p = Mul (e, away)
            g = Add (f, p)
            [fc] y = MatMul (g, w)
        }"""
    )
    arrays = {
        "w": [[20, -20], [0, 0], [-20, 20]],
        "low0": -1.01,
        "high0": 1.01,
        "away": [1e4, 0, 0],
    }
    model.graph.initializer.extend(numpy_helper.from_array(np.float32(v), n) for n, v in arrays.items())
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path


def test_images_without_a_preprocessing_get_the_likely_ones(colours: Path) -> None:
    """The error proposes likely preprocessings. With values of 0 to 255 the model puts every image into one class."""
    result = run(f"quantize {colours}/model.onnx --data {colours}/images -o {colours}/o.onnx")
    assert result.exit_code == 4
    trying, error = result.stderr.splitlines()
    assert "trying the usual preprocessings on up to 64 samples" in trying
    assert "Type --preprocess" in error
    likely = error.split("images: ")[1]
    assert "1.00" in likely
    for raw in ("none", "preprocess_method2", "bilinear,layout"):
        assert raw not in likely
    assert not (colours / "o.onnx").exists()
