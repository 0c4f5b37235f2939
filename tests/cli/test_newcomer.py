"""What somebody types who has not read the manual: near misses, older names, the next line, images as they are."""

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

from edgeq.cli import COMMANDS, GROUPS, group
from edgeq.cli._common import next_line
from tests.graphs import proto


def run(line: str) -> Result:
    return CliRunner().invoke(group, shlex.split(line))


def test_help_has_groups_with_every_command_once() -> None:
    listed = [name for commands in GROUPS.values() for name in commands]
    assert sorted(listed) == sorted(COMMANDS)
    assert len(listed) == len(set(listed))
    lines = run("--help").output.splitlines()
    for title, commands in GROUPS.items():
        place = lines.index(f"{title}:")
        assert lines[place + 1].split()[0] == next(iter(commands))


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("quantise model.onnx", "Did you mean quantize?"),
        ("evaluate m.onnx", "Did you mean"),
        ("bech m.onnx", "Did you mean bench?"),
        ("quantize m.onnx --taget x", "--target"),
        ("frobnicate", "See `edgeq --help`"),
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
    assert found == {"raspberry-pi-4", "raspberry-pi-5"}
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
    """Images that are red or blue, and a model that tells them apart where values are within -1 and 1 alone."""
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
    """Values of 0..255 put every image into one class: confident, and worth nothing."""
    result = run(f"quantize {colours}/model.onnx --data {colours}/images -o {colours}/o.onnx")
    assert result.exit_code == 4
    assert result.stderr.count("\n") == 1
    assert "Type --preprocess" in result.stderr
    likely = result.stderr.split("apart: ")[1]
    assert "1.00" in likely
    for raw in ("none", "preprocess_method2", "bilinear,layout"):
        assert raw not in likely
    assert not (colours / "o.onnx").exists()
