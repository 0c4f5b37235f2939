"""Give each option and argument a pipe, a device or a text that is slow to match: edgeq refuses each in one line.

The options come from click, so a new option is tried without a change here. A command that waits for ever is killed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edgeq.cli import GROUPS, group
from tests.cli.forked import Ended, run_each
from tests.cli.process import run
from tests.cli.workspace import fill

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pipes and pidfd, as Linux has them")

SECONDS = 60
"""A command ends long before, unless it waits for ever or takes quadratic time. The machine may be busy."""
LONG = 60_000
SUFFIXES = ("", ".onnx", ".npz", ".pb", ".toml", ".json", ".csv", ".png", ".edgeq")
NAMES = ("model.onnx", "manifest.json", "0.png", "1.npy", "input_0.pb", "labels.csv", "statistics.json")
GOOD = {
    "a": "net.onnx",
    "b": "net.onnx",
    "baseline": "net.onnx",
    "board": "ssh://user@127.0.0.1:1",
    "bundle": "bundle",
    "data": "x.npz",
    "float_model": "net.onnx",
    "inputs": "images/0.png",
    "key": "key.pem",
    "model": "net.onnx",
    "name": "imagenet",
    "output": "out",
    "parts": "stats",
    "path": "stats",
    "program": "program.npz",
    "quantized": "int8.onnx",
    "recipe": "recipe.toml",
    "reference": f"127.0.0.1:1/a@sha256:{0:064}",
}
"""Parameter → a value that a command accepts, or refuses only after it has read its other parameters."""
WITH = {
    "annotations": ("--task", "detection"),
    "classes": ("--task", "classification"),
    "decoder": ("--task", "detection"),
    "labels": ("--task", "classification"),
    "task_output": ("--task", "classification"),
    "reference": ("--data", "x.npz"),
    "preprocess": ("--data", "x.npz"),
}
"""Parameter → options without which the command would not read it."""
NOT_RUN = {("device", "emulate", "setup"): "makes whole machines from packages of the network"}
BLANKS = " " * LONG
TEXTS = (BLANKS + "x", f"x{BLANKS}=x", f"1{BLANKS}x", ",:" * (LONG // 2), "[" * LONG, "1" * LONG, f"x.py:{BLANKS}x")


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield each command with the words that name it. Commands that are also in a group are yielded once."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in command.list_commands(click.Context(command)):
        inner = command.get_command(click.Context(command), name)
        if inner is not None and not (path == () and name in {*GROUPS, "emulate"} and isinstance(inner, click.Group)):
            yield from commands(inner, (*path, name))


def takes_text(parameter: click.Parameter) -> bool:
    return isinstance(parameter.type, (click.Path, click.types.StringParamType)) and not getattr(
        parameter, "is_flag", False
    )


def case(path: tuple[str, ...], command: click.Command, parameter: click.Parameter, value: str) -> list[str]:
    """Return a command line that gives `value` to one parameter, and good values to all that are needed."""
    known = {option.name for option in command.params}
    options, arguments = [], []
    for other in command.params:
        given = value if other is parameter else GOOD[other.name or ""] if other.required else None
        if given is not None and isinstance(other, click.Argument):
            arguments.append(given)
        elif given is not None:
            options += [f"{max(other.opts, key=len)}={given}"]
    needed = WITH.get(parameter.name or "", ())
    if needed and needed[0].strip("-") in known and needed[0].strip("-") != parameter.name:
        options += needed
        options += [f"--{name}=x.npz" for name in ("data", "val") if name in known and f"--{name}=x.npz" not in options]
    options += ["--no-timing"] if any("--no-timing" in option.opts for option in command.params) else []
    return [*path, *options, "--", *arguments]


def cases() -> Iterator[list[str]]:
    """Yield a case for each parameter of each command, and more for parameters that few commands have.

    All values are tried in turn with the parameters of one name, because all commands read these in the same way.
    """
    values = [f"{kind}{suffix}" for kind in ("pipe", "zero") for suffix in SUFFIXES] + ["pipes", "zeros", *TEXTS]
    values = [values[place * 11 % len(values)] for place in range(len(values))]  # neighbours differ in kind
    taking = [(p, c, o) for p, c in commands(group) if p not in NOT_RUN for o in c.params if takes_text(o)]
    counts = Counter(option.name for _, _, option in taking)
    turns = {name: itertools.cycle(values[place % len(values) :] + values[: place % len(values)])
             for place, name in enumerate(sorted(map(str, counts)))}  # fmt: skip
    for path, command, option in taking:
        for _ in range(-(-4 // counts[option.name])):
            yield case(path, command, option, next(turns[str(option.name)]))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a workspace with pipes and endless devices under all names that edgeq reads."""
    place = tmp_path_factory.mktemp("endless")
    fill(place)
    for suffix in SUFFIXES:
        os.mkfifo(place / f"pipe{suffix}")
        (place / f"zero{suffix}").symlink_to("/dev/zero")
    for folder in ("pipes", "zeros"):
        (place / folder).mkdir()
    for name in NAMES:
        os.mkfifo(place / "pipes" / name)
        (place / "zeros" / name).symlink_to("/dev/zero")
    (place / "recipe.toml").write_text('[inspect]\nmodel = "net.onnx"\n')
    for name, made in (("bundle", "package"), ("stats", "calibrate"), ("int8.onnx", "quantize")):
        timed = () if made == "calibrate" else ("--no-timing",)
        assert run(made, "net.onnx", "--data", "x.npz", *timed, "-o", name, cwd=place).returncode == 0
    return place


def check(ended: Ended) -> str:
    """Return what is wrong with the end of a command, or ""."""
    if ended.code is None:
        return "did not end"
    if "Traceback" in ended.err or "bug in edgeq" in ended.err:
        return ended.err[-300:]
    return "" if not ended.code or len(ended.lines) == 1 else f"printed {len(ended.lines)} lines: {ended.err[-300:]}"


def test_every_option_ends_in_one_line(place: Path) -> None:
    tried = list(cases())
    assert len(tried) >= 200
    wrong = {}
    for ended in run_each(tried, place, seconds=SECONDS, XDG_CACHE_HOME=str(place / "cache")):
        if problem := check(ended):
            wrong[" ".join(word[:60] for word in ended.arguments)] = problem
    assert wrong == {}


CONTENTS = {
    "blanks.csv": f"a.png,{BLANKS}x\n",
    "blanks.txt": f"a{BLANKS}b\n",
    "blanks.json": f'{{"a": "{BLANKS}"}}',
    "blanks.toml": f'steps = "divide={BLANKS}x"\n',
    "blanks.pem": f"-----BEGIN {BLANKS}\n" * 3,
    "commas.csv": ",:" * LONG,
    "brackets.json": "[" * LONG,
    "comments.h": "/*" * LONG,
    "typedef.h": f"#define DIM 16\ntypedef {BLANKS}elem\n" + "typedef " * LONG,
    "cache.cache": f"a {BLANKS}: 1\n",
}


def test_files_with_texts_that_are_slow_to_match(place: Path) -> None:
    for name, text in CONTENTS.items():
        (place / name).write_text(text)
    taking = [(p, c, o) for p, c in commands(group) if p not in NOT_RUN for o in c.params if takes_text(o)]
    by_name = {o.name: (p, c, o) for p, c, o in taking if isinstance(o.type, click.Path) or o.name in WITH}
    tried = [case(*reader, name) for reader in by_name.values() for name in CONTENTS]
    wrong = [
        (ended.arguments, problem)
        for ended in run_each(tried, place, seconds=SECONDS, XDG_CACHE_HOME=str(place / "cache"))
        if (problem := check(ended))
    ]
    assert wrong == []


def test_a_runner_does_not_wait_for_its_archive(place: Path) -> None:
    bundle = place / "piped"
    shutil.copytree(place / "bundle", bundle)
    (bundle / "edgeq_device.zip").unlink()
    os.mkfifo(bundle / "edgeq_device.zip")
    command = [sys.executable, "edgeq_run.py", "info"]
    ran = subprocess.run(command, cwd=bundle, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ran.returncode != 0
    assert "it is a pipe" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
