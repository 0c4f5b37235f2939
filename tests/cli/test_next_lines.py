"""Test that every line that a command proposes works: run the command, then the line that it printed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.latency import WarmUp

from edgeq.cli import COMMANDS, group
from edgeq.cli._next import NEXT, next_line
from edgeq.errors import GoalNotMetError
from edgeq.jobs import demo
from tests.bundle.oci.registry import in_process
from tests.bundle.signing.keys import write_key
from tests.cli.workspace import Workspace
from tests.remote.conftest import FakeBoard, make_board

__all__ = ["make_board"]

SAMPLES = "--data x.npz"
LABELLED = "--data labelled.npz --preprocess key=x,label=y --task classification"
TYPED = (
    f"audit int8.onnx --float net.onnx {SAMPLES}",
    "bench bundle",
    f"calibrate collect dynamic.onnx {SAMPLES} --fix N=1 --fix H=8 --fix W=8 -o new",
    "calibrate merge shard-0 shard-1 -o merged",
    "calibrate show statistics",
    "compare net.onnx int8.onnx",
    f"compare net.onnx int8.onnx {SAMPLES} --count 2",
    f"debug net.onnx int8.onnx {SAMPLES}",
    "demo",
    "demo --files files",
    "detect",
    "device list",
    "doctor",
    f"emit-c array.onnx {SAMPLES} -o c",
    f"eval int8.onnx {LABELLED}",
    f"eval int8.onnx {SAMPLES} --reference net.onnx",
    f"eval net.onnx {LABELLED}",
    "extensions",
    "gate int8.onnx --baseline baseline.onnx",
    "inspect int8.onnx",
    "inspect net.onnx",
    f"package net.onnx {SAMPLES} -t nvidia-t4 -o new",
    f"package net.onnx {SAMPLES} -t gemmini -t haswell --split -o new",
    f"package net.onnx {SAMPLES} -t board.toml -o new",
    f"package net.onnx {SAMPLES} -o new.edgeq",
    "preprocess list",
    "preprocess show tf",
    "profiles list",
    "profiles show x86-64-avx2",
    "pull REFERENCE -o new",
    "push bundle HOST/models/net:1",
    "push signed HOST/models/net:1",
    f"quantize dynamic.onnx {SAMPLES} -t hexagon-v73 --fix N=1 --fix H=8 --fix W=8 -o new.onnx",
    "infer net.onnx images/0.png --preprocess divide=255,layout=NCHW --raw new.npz",
    f"quantize net.onnx {SAMPLES} --count 3 -o new.onnx",
    "quantize net.onnx --calibration statistics --val x.npz -o new.onnx",
    "report bundle",
    "report for-others",
    "retarget int8.onnx -t raspberry-pi-5 -o new.onnx",
    "run recipe.toml --dry-run",
    "sign bundle --key key.pem",
    "targets list",
    "targets show nvidia-a100",
    f"tune net.onnx {SAMPLES} --no-memory -t gemmini -o new",
    "verify bundle",
    "verify for-others --on all",
)
NOT_RUN = (
    "toolkit rknn --install",
    "device setup pi",
    "emulate setup",
    "emulate status",
    f"tune net.onnx {SAMPLES} --dry-run -o new",
)
"""What takes a network, or a search that another flow runs: the line that it would print runs, or is parsed."""
NAMES = {
    "profiles": "nvidia-sm80",
    "targets": "haswell",
    "preprocess": "tf",
    "extensions": "entropy",
}


def words_of(line: str, flow: str, place: str) -> list[str]:
    """Return the words of a line, with its placeholders replaced by files and names of the workspace."""
    filled = {
        "MODEL.onnx": "net.onnx",
        "FLOAT.onnx": "net.onnx",
        "SAMPLES": "x.npz",
        "IMAGES": "images",
        "BUNDLE": "bundle" if " verify " in line else "proposed",
        "HOST/REPOSITORY:TAG": f"{place}/models/net:2",
        "KEY.pub": "key.pub",
        "NAME": NAMES.get(flow.split()[0], ""),
        "int8.onnx": "proposed.onnx" if " -o int8.onnx" in line else "int8.onnx",
    }
    line = line.replace("--data LABELLED --task classification", LABELLED)
    return [filled.get(word, word) for word in shlex.split(line)]


@pytest.fixture(scope="module")
def made(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a workspace that also contains the outputs of other commands."""
    place = tmp_path_factory.mktemp("made") / "workspace"
    shutil.copytree(filled, place)
    write_key(place)
    (place / "board.toml").write_text('title = "x"\nextends = "x86-64-avx2"\n')
    (place / "recipe.toml").write_text('[inspect]\nmodel = "net.onnx"\n')
    data = (place / "net.onnx", "--data", place / "x.npz", "--no-timing")
    elsewhere = ("-t", "nvidia-t4", "-t", "raspberry-pi-5", "-t", "hexagon-v73")
    for words in (
        ("quantize", *data, "-o", place / "int8.onnx"),
        ("quantize", *data, "-t", "gemmini", "-o", place / "array.onnx"),
        ("calibrate", *data[:-1], "-o", place / "statistics"),
        *(("calibrate", *data[:-1], "--start", k, "--stride", 2, "-o", place / f"shard-{k}") for k in (0, 1)),
        ("package", *data, "--with-float", "-o", place / "bundle"),
        ("package", *data, "--no-emulate", *elsewhere, "-o", place / "for-others"),
    ):
        ran = Workspace(place).run(*words)
        assert ran.code == 0, ran.err
    shutil.copyfile(place / "int8.onnx", place / "baseline.onnx")
    shutil.copytree(place / "bundle", place / "signed")
    assert Workspace(place).run("sign", place / "signed", "--key", place / "key.pem").code == 0
    return place


@pytest.fixture
def place(
    made: Path,
    tmp_path: Path,
    make_board: Callable[[str], FakeBoard],
    monkeypatch: pytest.MonkeyPatch,
    made_up_memory: None,
) -> Iterator[str]:
    """Enter a copy of the workspace, add a board, make timing brief, and yield the host of a registry."""
    shutil.copytree(made, tmp_path / "workspace")
    monkeypatch.chdir(tmp_path / "workspace")
    make_board("pi")
    Path("devices.toml").write_text('[devices.pi]\nhost = "pi"\n')
    brief = BenchSettings(min_duration_s=0.0, min_queries=2, warm_up=WarmUp(min_s=0.0, max_s=0.1))
    monkeypatch.setattr(demo, "BenchSettings", lambda: brief)
    for name in ("bench", "compare", "gate"):
        for option in command_of([name]).params:
            if option.name in ("duration_s", "min_queries"):
                monkeypatch.setattr(option, "default", 0 if option.name == "duration_s" else 2)
    monkeypatch.setattr("edgeq.cli.explain._open", lambda page, printer: None)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with in_process() as registry:
        yield registry.host


def command_of(words: list[str]) -> click.Command:
    found = group.get_command(click.Context(group), words[0])
    assert found is not None
    return found.commands[words[1]] if isinstance(found, click.Group) else found


def run(words: list[str]) -> str:
    """Return the standard output of a command that succeeds, or of a tuning run that finds nothing faster."""
    if words[0] == "make":
        assert shutil.which("make"), "make is needed to compile"
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
    ran = Workspace(Path()).run(*words[1:])
    assert ran.code == 0 or (words[1] == "tune" and ran.code == GoalNotMetError.exit_code), ran.err
    return ran.out


@pytest.mark.slow
@pytest.mark.parametrize("typed", TYPED)
def test_the_proposed_line_runs(typed: str, place: str) -> None:
    if "REFERENCE" in typed:
        pushed = Workspace(Path()).run("push", "bundle", f"{place}/models/net:1", "--json").json()["reference"]
        typed = typed.replace("REFERENCE", pushed)
    printed = run(["edgeq", *shlex.split(typed.replace("HOST", place))])
    *_, last = printed.splitlines()
    assert last.startswith("next: ")
    run(words_of(last.removeprefix("next: "), typed, place))


def test_no_line_compares_a_model_with_itself(place: str) -> None:
    printed = run(["edgeq", *shlex.split(f"eval net.onnx {SAMPLES} --reference net.onnx")])
    assert "next:" not in printed


@pytest.mark.parametrize("typed", NOT_RUN)
def test_the_line_behind_what_takes_long(typed: str, place: str) -> None:
    line = next_line(parsed(shlex.split(typed)))
    assert line is not None
    words = words_of(line, typed, place)
    if words[1:3] == ["emulate", "setup"] or words[1] == "tune":
        parsed(words[1:])
    else:
        run(words)


def parsed(words: list[str]) -> click.Context:
    context: Any = click.Context(group, info_name="edgeq")
    command = group.get_command(context, words[0])
    while isinstance(command, click.Group):
        context = command.make_context(words[0], words[1:], parent=context)
        words = words[1:]
        command = command.commands[words[0]]
    assert command is not None
    return command.make_context(words[0], words[1:], parent=context)


def test_every_command_with_a_line_is_among_them() -> None:
    assert {typed.split()[0] for typed in TYPED + NOT_RUN} == set(COMMANDS)


def test_every_line_is_among_them() -> None:
    """Each key of `NEXT` (a command, a subcommand or an option) is in one of the tested lines."""
    all_typed = " | ".join((*TYPED, *NOT_RUN)).replace("dry-run", "dry_run").replace(" -t ", " target ")
    typed = all_typed.replace("--", "").split(" | ")
    for key in NEXT:
        assert any(set(key.split()) <= set(words.split()) for words in typed), key
