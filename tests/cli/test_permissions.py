"""Test recipes from somebody else: they run no code and write nothing elsewhere unless the user permits it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeq.cli._options import Output
from edgeq.cli.run import HOSTS, PROGRAMS
from tests.cli.test_recipe import EVERY
from tests.cli.workspace import Workspace

CODE = "from pathlib import Path\nPath('RAN').write_text('')\n\n\ndef function(*_):\n    raise ValueError\n"
QUANTIZE = "[quantize]\nmodel = 'net.onnx'\ndata = 'x.npz'\nno_timing = true\n"
HEAD = "[eval]\nmodel = 'net.onnx'\ndata = 'x.npz'\n"


@pytest.fixture
def theirs(workspace: Workspace) -> Workspace:
    """Make a user's folder that contains a folder from somebody else."""
    folder = workspace.path / "theirs"
    folder.mkdir()
    for name in ("net.onnx", "x.npz"):
        (folder / name).write_bytes((workspace.path / name).read_bytes())
    (folder / "evil.py").write_text(CODE)
    (folder / "away").symlink_to("..")
    return workspace


def write(workspace: Workspace, text: str) -> str:
    (workspace.path / "theirs" / "recipe.toml").write_text(text)
    return "theirs/recipe.toml"


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        (f"{QUANTIZE}output = 'o.onnx'\npreprocess = 'evil.py:function'", "--allow-code"),
        (f"preprocess = 'evil.py:function'\n{QUANTIZE}output = 'o.onnx'", "--allow-code"),
        (f"{HEAD}task = 'evil.py:function'", "--allow-code"),
        (f"{HEAD}task = 'detection'\ndecoder = 'evil.py:function'", "--allow-code"),
        ("[preprocess.show]\nname = 'evil.py:function'", "--allow-code"),
        (f"{HEAD}workers = 'tcp://127.0.0.1:9'", "--allow-code"),
        ("[emulate.setup]\nsysroot = 'root'", "--allow-code"),
        ("[device.setup]\nboard = 'ssh://me@127.0.0.1'\nwheels = 'wheels'", "--allow-hosts"),
        ("[doctor]\non = 'ssh://me@127.0.0.1:9'", "--allow-hosts"),
        ("[push]\nbundle = 'b'\nreference = '127.0.0.1:9/b'", "--allow-hosts"),
        (f"{QUANTIZE}output = '../o.onnx'", "--allow-outputs"),
        (f"{QUANTIZE}output = 'away/o.onnx'", "--allow-outputs"),
        (f"{QUANTIZE}output = '/tmp/../tmp/edgeq-o.onnx'", "--allow-outputs"),
        ("[demo]\noutput = '../demo'", "--allow-outputs"),
        ("[demo]\nfiles = '..'", "--allow-outputs"),
        ("[calibrate.show]\npath = 'c'\nsvg = '../o.svg'", "--allow-outputs"),
        ("[report]\nbundle = '../b'", "--allow-outputs"),
        ("[report]\nbundle = '.'", "--allow-outputs"),
        ("[sign]\nbundle = '../b'\nkey = 'k'", "--allow-outputs"),
        ("[gate]\nmodel = 'net.onnx'\nbaseline = '../net.onnx'\nupdate = true", "--allow-outputs"),
        ("[gate]\nmodel = 'net.onnx'\nbaseline = 'net.onnx'\njunit = '../j.xml'", "--allow-outputs"),
        (f"{QUANTIZE}output = 'net.onnx'\nforce = true", "--force"),
        (f"force = true\n{QUANTIZE}output = 'o.onnx'", "--force"),
        # The first command is not run if the second one is refused.
        (f"{QUANTIZE}output = 'o.onnx'\n[demo]\noutput = '../demo'", "--allow-outputs"),
    ],
)
def test_what_is_refused_until_it_is_typed(theirs: Workspace, text: str, needs: str) -> None:
    recipe = write(theirs, text)
    ran = theirs.refused(2, "run", recipe, says=f"pass {needs}")
    assert ran.line.startswith(f"edgeq: {recipe}: [")
    listed = theirs.run("run", recipe, "--dry-run", "--json")
    assert listed.code == 0
    assert listed.after == listed.before
    assert any(needs in line for line in json.loads(listed.out)["lacking"])
    assert "next:" not in theirs.run("run", recipe, "--dry-run").out


def test_code_runs_where_it_is_allowed(theirs: Workspace) -> None:
    recipe = write(theirs, f"{QUANTIZE}output = 'o.onnx'\npreprocess = 'evil.py:function'")
    theirs.run("run", recipe, "--allow-code")
    assert (theirs.path / "theirs" / "RAN").exists()


def test_force_is_typed(theirs: Workspace) -> None:
    recipe = write(theirs, f"{QUANTIZE}output = 'o.onnx'")
    assert theirs.run("run", recipe).code == 0
    theirs.refused(6, "run", recipe, says="exists")
    assert theirs.run("run", recipe, "--force").code == 0
    recipe = write(theirs, f"{QUANTIZE}output = 'o.onnx'\nforce = true\npreprocess = 'evil.py:function'")
    typed = ("--force", "--allow-code", "--allow-outputs", "out")
    listed = theirs.run("run", recipe, "--dry-run", *typed)
    assert f"next: edgeq run {recipe} {' '.join(typed)}\n" in listed.out


def test_outputs_lie_below_the_folder_or_one_that_is_typed(theirs: Workspace) -> None:
    text = "[demo]\nfiles = 'below/files'\n[gate]\nmodel = 'net.onnx'\nbaseline = '../net.onnx'\nduration = 0.01"
    ran = theirs.run("run", write(theirs, text))
    assert ran.code in (0, 14), ran.err
    recipe = write(theirs, "[demo]\nfiles = '../out/files'")
    theirs.refused(2, "run", recipe, "--allow-outputs", "out/files", says="outside the recipe's folder")
    assert theirs.run("run", recipe, "--allow-outputs", "out").code == 0
    assert any((theirs.path / "out" / "files").iterdir())


def test_every_output_is_known_as_one() -> None:
    for _, command in EVERY:
        for parameter in command.params:
            if parameter.name in ("output", "junit", "svg", "files"):
                assert isinstance(parameter.type, Output), command.name


def test_the_names_are_those_of_parameters() -> None:
    known = {parameter.name for _, command in EVERY for parameter in command.params}
    assert known >= PROGRAMS | HOSTS


def test_a_printed_recipe_holds_no_control_characters(workspace: Workspace) -> None:
    name = "a\x1b]0;owned\x07\x9b2J\u202e\u2028é\U0001f642\U000e0041.onnx"
    printed = workspace.run("quantize", name, "-o", "o.onnx", "--print-recipe")
    assert printed.out.replace("\n", "").isprintable()
    assert "é\U0001f642" in printed.out
    unwritable = workspace.run("quantize", "a\udcff.onnx", "-o", "o.onnx", "--print-recipe")
    assert unwritable.code == 2
    assert r"a\udcff.onnx' is not UTF-8" in unwritable.line


def test_a_printed_recipe_reads_back(workspace: Workspace) -> None:
    import tomllib

    name = "a\x1b\x7f\x9b\u202e\u2028\U000e0041.onnx"
    printed = workspace.run("inspect", name, "--print-recipe")
    assert tomllib.loads(printed.out) == {"inspect": {"model": name}}
    assert Path(name).name == name
