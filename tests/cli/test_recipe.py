"""Test recipes: command lines as TOML, written and read."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from edgeq import demo
from edgeq.cli import COMMANDS, group
from edgeq.cli._recipe import read_recipe

NAME = 'a "b" \\ \x7f é\U0001f642'


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(group, [str(argument) for argument in arguments], prog_name="edgeq")


def leaves(parent: click.Group, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(parent)
    for name in parent.list_commands(context):
        command = parent.get_command(context, name)
        if isinstance(command, click.Group):
            yield from leaves(command, (*names, name))
        elif command is not None and name != "run":
            yield (*names, name), command


EVERY = list(leaves(group, ()))


def sample(parameter: click.Parameter) -> str:
    """Return a valid value for a parameter."""
    if isinstance(parameter.type, click.Choice):
        return str(parameter.type.choices[-1])
    if parameter.name == "workers":
        return "tcp://scheduler:8786"
    if parameter.name == "reference":
        return "registry.example.com/net:1.0"
    return {"integer": "3", "integer range": "3", "float": "1.5", "float range": "1.5"}.get(parameter.type.name, NAME)


@pytest.mark.parametrize(("names", "command"), EVERY, ids=[" ".join(names) for names, _ in EVERY])
def test_every_command_prints_a_recipe_that_says_the_same(
    names: tuple[str, ...], command: click.Command, tmp_path: Path
) -> None:
    for off in (False, True):
        options, positional = [], []
        for parameter in command.params:
            if not isinstance(parameter, click.Option):
                positional += [sample(parameter)] * (2 if parameter.nargs == -1 else 1)
            elif not parameter.is_flag:
                options += [parameter.opts[0], sample(parameter)] * (2 if parameter.multiple else 1)
            elif parameter.name not in ("as_json", "quiet", "verbose", "print_recipe", "help"):
                options.append(parameter.secondary_opts[0] if off and parameter.secondary_opts else parameter.opts[-1])
        printed = run(*names, *options, "--print-recipe", "--", *positional)
        assert printed.exit_code == 0, printed.output
        place = tmp_path / "recipe.toml"
        place.write_text(printed.stdout, "utf-8")
        (step,) = read_recipe(place, group)
        wanted = command.make_context("x", [*options, "--", *positional]).params
        assert step.context.params == wanted


def test_prints_only_given_options() -> None:
    options = ["--no-per-channel", "--exclude", "a", "--exclude", "b", "--json", "--print-recipe"]
    printed = run("quantize", "m.onnx", "-o", "out.onnx", *options)
    assert tomllib.loads(printed.stdout) == {
        "quantize": {"model": "m.onnx", "output": "out.onnx", "per_channel": False, "exclude": ["a", "b"]}
    }


def test_a_recipe_does_what_its_options_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.onnx").write_bytes(demo.MODEL.read_bytes())
    (tmp_path / "samples.npz").write_bytes(demo.CALIBRATION.read_bytes())
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'model = "model.onnx"\ndata = "samples.npz"\ncount = 2\n'
        '[inspect]\n[quantize]\noutput = "int8.onnx"\nno_timing = true\nrequire_coverage = 0.5\n'
    )
    monkeypatch.chdir(tmp_path.parent)
    listed = run("run", recipe, "--dry-run", "--json")
    assert json.loads(listed.stdout)["commands"][0] == "edgeq inspect -- model.onnx"
    done = run("run", recipe, "-q")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "int8.onnx").is_file()
    assert Path.cwd() == tmp_path.parent
    again = run("run", recipe, "-q")
    assert again.exit_code == 6
    assert "exists" in again.stderr
    printed = run("quantize", tmp_path / "model.onnx", "--data", tmp_path / "samples.npz", "--count", 2, "--no-timing",
                  "--require-coverage", "0.5", "-o", tmp_path / "direct.onnx", "-q")  # fmt: skip
    assert printed.exit_code == 0, printed.output
    assert (tmp_path / "direct.onnx").read_bytes() == (tmp_path / "int8.onnx").read_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[quantize]\noutput = 'o'", "quantize.model is missing. Add it"),
        ("[quantise]\nmodel = 'm'", "[quantise] is not a command. Did you mean quantize?"),
        ("[quantize]\nmodel = 'm'\noutput = 'o'\nmax-drop = 1", "key 'max-drop' in [quantize]. Did you mean max_drop?"),
        ("[quantize]\nmodel = 'm'\noutput = 'o'\nforce = 'yes'", "quantize.force is 'yes'. Make it true or false"),
        ("[quantize]\nmodel = 'm'\noutput = 'o'\ncount = 'all'", "quantize.count is 'all'. Make it a whole number"),
        ("[quantize]\nmodel = 'm'\noutput = 'o'\ncount = 0", "[quantize]: Invalid value for '--count'"),
        ("modell = 'm'\n[inspect]\nmodel = 'm'", "unknown key 'modell' at the top. Did you mean model?"),
        ("model = 'm'", "contains no command. Add a table for one, such as [quantize]"),
        ("[run]\nrecipe = 'r.toml'", "[run] is not a command"),
        ("[calibrate.colect]\nmodel = 'm'", "[calibrate.colect] is not a command. Did you mean collect?"),
        ("[emit_c.x]\n", "unknown key 'x' in [emit_c]"),
        ("model = ", "is not TOML"),
        (None, "cannot be read"),
    ],
)  # fmt: skip
def test_reports_mistakes_with_file_key_and_fix(text: str | None, said: str, tmp_path: Path) -> None:
    place = tmp_path / "r.toml"
    if text is not None:
        place.write_text(text)
    failed = run("run", place)
    assert failed.exit_code == 2
    assert f"edgeq: {place}" in failed.stderr
    assert said in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_a_recipe_replaces_what_its_command_replaces_without_force(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(demo.MODEL.read_bytes())
    (tmp_path / "samples.npz").write_bytes(demo.CALIBRATION.read_bytes())
    place = tmp_path / "r.toml"
    package = "[package]\nmodel = 'model.onnx'\ndata = 'samples.npz'\ncount = 2\nno_timing = true\noutput = 'b'\n"
    place.write_text(package)
    assert run("run", place, "-q").exit_code == 0
    place.write_text("[report]\nbundle = 'b'\noutput = 'page.html'\n")
    for _ in range(2):
        done = run("run", place, "-q")
        assert done.exit_code == 0, done.output


def test_a_wrong_step_is_found_before_the_first_runs(tmp_path: Path) -> None:
    place = tmp_path / "r.toml"
    place.write_text(f"[inspect]\nmodel = {json.dumps(str(demo.MODEL))}\n[quantize]\noutput = 'o'\n")
    failed = run("run", place)
    assert failed.exit_code == 2
    assert failed.stdout == ""
    assert "run" in COMMANDS


def test_the_recipe_in_the_documentation_is_one(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "recipe.md"
    place = tmp_path / "recipe.toml"
    place.write_text(page.read_text("utf-8").partition("```toml\n")[2].partition("```")[0], "utf-8")
    quantized, packaged, compared = read_recipe(place, group)
    assert quantized.arguments[0] == "quantize"
    assert packaged.context.params["targets"] == ("raspberry-pi-5", "haswell")
    assert compared.context.params["data"] == "val/"
    assert compared.context.params["max_drop"] == "1%"


def test_an_output_beside_the_model_does_not_leave_the_folder_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    place = tmp_path / "recipes" / "r.toml"
    place.write_text("[quantize]\nmodel = '../net.onnx'\n")
    failed = run("run", place, "--dry-run")
    assert "refused" in failed.stdout
    assert "net.int8.onnx' would be written outside the recipe's folder" in failed.stdout


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("[quantize]\nmodel = 'modle.onnx'\noutput = 'b'", "[quantize] model: modle.onnx does not exist"),
        ("[compare]\na = 'model.onnx'\nb = 'b.onnx'", "[compare] b: b.onnx does not exist"),
        ("[quantize]\nmodel = 'model.onnx'\ndata = 'calib'\noutput = 'b'", "[quantize] data: calib does not exist"),
        ("[package]\nmodel = 'model.onnx'\ntarget = ['haswell', 'hasvell']\noutput = 'b'", "[package] target: unknown"),
        ("[tune]\nmodel = 'model.onnx'\npreprocess = 'imagnet'\noutput = 'b'", "[tune] preprocess: no preprocessing"),
        ("[eval]\nmodel = 'a.onnx'\ndata = 'model.onnx'\ntask = 'classificaton'", "[eval] task: unknown task"),
        ("[eval]\nmodel = 'a.onnx'\ndata = 'model.onnx'\nengine = 'openvno'", "[eval] engine: unknown engine"),
        ("[eval]\nmodel = 'a.onnx'\ndata = 'model.onnx'\ndecoder = 'yolo.py:f'", "[eval] decoder: yolo.py does not"),
        ("[package]\nmodel = 'a.onnx'\nhead = 'yolov88'\noutput = 'b'", "[package] head: unknown head"),
        ("[package]\nmodel = 'a.onnx'\nmax_drop = 'much'\noutput = 'b'", "[package] max_drop: --max-drop 'much'"),
        ("[package]\nmodel = 'a.onnx'\noutput = 'model.onnx'", "[package] output: model.onnx exists already"),
        ("[package]\nmodel = 'a.onnx'\noutput = 'a.onnx'", "[package] output: a.onnx is already the output of [quanti"),
    ],
)
def test_checks_files_outputs_and_names_before_the_first_command(second: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(demo.MODEL.read_bytes())
    place = tmp_path / "r.toml"
    first = "[quantize]\nmodel = 'model.onnx'\noutput = 'a.onnx'\n"
    place.write_text(second if second.startswith("[quantize]") else first + second)
    failed = run("run", place, "--allow-code")
    assert failed.exit_code != 0
    assert failed.stdout == ""
    assert failed.stderr.startswith(f"edgeq: {place}: {said}")
    assert failed.stderr.count("\n") == 1
    assert not (tmp_path / "a.onnx").exists()
