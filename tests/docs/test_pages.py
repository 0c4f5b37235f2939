"""Every code block and command line of the README and the pages is run as it stands; see run_pages.py."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from edgeq.cli import group
from edgeq.errors import UsageError
from tests.docs.blocks import LANGUAGES, REPOSITORY, blocks, pages, spans
from tests.docs.exceptions import HEAVY, NOT_RUN

SHARDS = 4
PLACEHOLDER = re.compile(r"[…|]|\.\.\.")


def typed() -> set[str]:
    """Every command line of the pages as it is split into words, and the first line of every Python block."""
    found = {block.text.partition("\n")[0] for page in pages() for block in blocks(page) if block.language == "python"}
    lines = (command for page in pages() for block in blocks(page) for _, command in _commands(block))
    return found | {" ".join(shlex.split(line, comments=True)) for line in lines}


def _commands(block):  # type: ignore[no-untyped-def]
    return block.commands() if block.language in ("sh", "console") else ()


def run(*arguments: str, folder: Path) -> None:
    """`python -m tests.docs.run_pages` with the fast clock, beside the user's own settings."""
    fast = Path(__file__).parent / "fast_clock"
    path = os.pathsep.join(map(str, (fast, REPOSITORY, REPOSITORY / "targets" / "runtime")))
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_pages", *arguments],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "XDG_CONFIG_HOME": str(folder),
            "XDG_CACHE_HOME": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_block_does_what_its_page_says(shard: int, tmp_path: Path) -> None:
    """In as many processes as there are shards, so that several can run at once."""
    names = [str(page.relative_to(REPOSITORY)) for page in pages()]
    run(*names[shard::SHARDS], folder=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not HEAVY, reason="no line is heavy")
def test_heavy_lines_do_what_their_pages_say(tmp_path: Path) -> None:
    heavy = [page for page in pages() if any(line in HEAVY for line in lines_of(page))]
    run("--heavy", *[str(page.relative_to(REPOSITORY)) for page in heavy], folder=tmp_path)


def lines_of(page: Path) -> set[str]:
    return {" ".join(shlex.split(c, comments=True)) for block in blocks(page) for _, c in _commands(block)}


def test_every_block_says_what_it_is() -> None:
    unknown = [f"{b.page}:{b.line}" for page in pages() for b in blocks(page) if b.language not in LANGUAGES]
    assert not unknown, f"give these fences one of {LANGUAGES}: {unknown}"


def test_what_is_listed_as_not_run_is_there() -> None:
    assert (NOT_RUN.keys() | HEAVY.keys()) - typed() == set()


def parsed(words: list[str]) -> str:
    """ "" where there is such a command with such options; else what its parser says. Values are not looked at."""
    command: click.Command = group
    context = click.Context(group)
    try:
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name, found, words = command.resolve_command(context, words)
            assert found is not None
            command, context = found, click.Context(found, parent=context, info_name=name)
        command.make_parser(context).parse_args(list(words))
    except click.BadOptionUsage:
        pass  # the name of an option alone, in the text
    except (click.UsageError, UsageError) as error:
        return str(error)
    return ""


def test_the_parser_is_strict() -> None:
    assert parsed(["quantise", "model.onnx"]) != ""
    assert parsed(["quantize", "--colour", "red"]) != ""
    assert parsed(["profiles", "show", "--why"]) == ""


@pytest.mark.parametrize("line", sorted(NOT_RUN.keys() | HEAVY.keys()))
def test_what_is_listed_exists(line: str) -> None:
    words = line.split()
    if words[0] == "edgeq":
        assert parsed(words[1:]) == ""
    elif words[0].startswith("scripts/"):
        assert (REPOSITORY / words[0]).is_file()
        if words[0] == "scripts/benchmark":
            assert (REPOSITORY / "benchmarks" / f"{words[1]}.py").is_file()
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        assert {name for found in re.findall(r"\[(.*)\]", line) for name in found.split(",")} <= set(extras)


def test_commands_in_the_text_exist() -> None:
    """Code spans that begin with `edgeq COMMAND`: the command and its options, in whatever example."""
    wrong = []
    for page in pages():
        for line, span in spans(page):
            words = span.split()
            if words[:1] == ["edgeq"] and words[1:] and re.fullmatch(r"[a-z-]+", words[1]):
                problem = parsed([word for word in words[1:] if not PLACEHOLDER.search(word)])
                if problem:
                    wrong.append(f"{page.relative_to(REPOSITORY)}:{line}: `{span}`: {problem}")
    assert not wrong, "\n".join(wrong)


def test_every_page_is_in_the_index() -> None:
    """As the build of the site says too, without it: in a table of contents of docs/index.md."""
    text = (REPOSITORY / "docs" / "index.md").read_text("utf-8")
    listed = {
        line.strip() for block in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL) for line in block.split("\n")
    }
    there = {str(page.relative_to(REPOSITORY / "docs").with_suffix("")) for page in pages() if page.name != "README.md"}
    assert there - {"index"} - listed == set()
