"""Test recipes from somebody else: they run no code and write nothing elsewhere unless the user permits it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeq.cli._common import GroupedCommand
from edgeq.cli._options import OutputPath
from edgeq.cli.run import HOSTS, PROGRAMS, STARTS
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
        ("[emulate.setup]\nsysroot = 'root'", "--allow-installs"),
        ("[device.setup]\nboard = 'ssh://me@127.0.0.1'\nwheels = 'wheels'", "--allow-installs"),
        ("[device.setup]\nboard = 'ssh://me@127.0.0.1'", "--allow-installs"),
        ("[toolkit]\nname = 'rknn'\ninstall = true", "--allow-installs"),
        ("install = true\n[toolkit]\nname = 'rknn'", "--allow-installs"),
        ("[info.toolkit]\nname = 'rknn'\ninstall = true", "--allow-installs"),
        ("[emulate.setup]", "--allow-installs"),
        ("[device.emulate.setup]\nmachine = 'arm64'", "--allow-installs"),
        ("[report]\nbundle = 'b'\nopen = true\noutput = 'r.html'", "--allow-code"),
        ("[device.clean]\nboard = 'ssh://me@127.0.0.1'", "--allow-hosts"),
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
def test_recipes_need_typed_permissions(theirs: Workspace, text: str, needs: str) -> None:
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


ALL = ("--allow-code", "--allow-installs", "--allow-hosts", "--force")


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("[toolkit]\nname = 'rknn'\ninstall = true", ["--allow-installs"], "downloads and installs rknn-toolkit2"),
        ("[emulate.setup]\nsysroot = 'root'", ["--allow-code", "--allow-installs"], "the emulated machine arm64"),
        ("[device.setup]\nboard = 'pi'", ["--allow-hosts", "--allow-installs"], "installs numpy and onnxruntime on pi"),
        ("[report]\nbundle = 'b'\nopen = true\noutput = 'r.html'", ["--allow-code"], "open = 'True' starts a program"),
    ],
)  # fmt: skip
def test_a_dry_run_shows_each_permission_and_starts_nothing(
    theirs: Workspace, monkeypatch: pytest.MonkeyPatch, text: str, options: list[str], says: str
) -> None:
    cache = theirs.path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    recipe = write(theirs, text)
    refused = theirs.run("run", recipe, "--dry-run")
    assert says in refused.out
    for option in ALL:
        assert (f"pass {option} to edgeq run" in refused.out) == (option in options)
        if option in options:  # every other permission is not enough
            others = [other for other in ALL if other != option]
            theirs.refused(2, "run", recipe, *others, says=f"pass {option} to edgeq run")
    allowed = json.loads(theirs.run("run", recipe, "--dry-run", "--json", *options).out)
    assert allowed["lacking"] == []
    assert any(says in line for line in allowed["allowed"])
    assert not cache.exists()


def test_nothing_is_asked_for_a_listing(theirs: Workspace) -> None:
    text = "[toolkit]\n[emulate.status]\n[report]\nbundle = 'b'\nopen = false\noutput = 'r.html'"
    listed = json.loads(theirs.run("run", write(theirs, text), "--dry-run", "--json").out)
    assert (listed["lacking"], listed["allowed"]) == ([], [])


def test_every_command_that_installs_asks() -> None:
    asking = set()
    for names, command in EVERY:
        assert isinstance(command, GroupedCommand)
        given = {parameter.name: parameter.default for parameter in command.params}
        given |= {"wanted": True, "name": "rknn", "board": "pi", "machine": "arm64"}
        options = {option for parameter in command.params for option in parameter.opts}
        if command.installs(given):
            asking.add(names)
        else:
            assert names[-1] != "setup", names
            assert "--install" not in options, names
    assert {names[-2:] for names in asking} >= {("emulate", "setup"), ("device", "setup"), ("info", "toolkit")}


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
                assert isinstance(parameter.type, OutputPath), command.name


def test_the_names_are_those_of_parameters() -> None:
    known = {parameter.name for _, command in EVERY for parameter in command.params}
    assert known >= PROGRAMS | STARTS | HOSTS


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
