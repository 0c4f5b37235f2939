"""Run every code block and command line of the README and the pages as it is; see run_pages.py."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import click
import pytest

from edgeq.cli import group
from edgeq.emulate.cache import home
from edgeq.emulate.routes import FOLDER
from edgeq.errors import UsageError
from tests.docs.blocks import LANGUAGES, REPOSITORY, Block, Command, blocks, count_words, installation, pages, spans
from tests.docs.exceptions import NOT_COMPARED, NOT_RUN

SHARDS = 4
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
OUTPUT = re.compile(r"^(\$ |edgeq: |note: |found: |next: |bundle: |against float32: |size \d)", re.MULTILINE)
MOST_WORDS = 250
EXPLANATIONS = {"architecture", "security", "why", "errors", "results", "published", "boards-measured"}
"""Pages to look something up in, next to docs/reference."""
PLACEHOLDER = re.compile(r"[…|]|\.\.\.")


def typed() -> set[str]:
    """Return every command line of the pages, split into words, and the first line of every Python block."""
    found = {block.text.partition("\n")[0] for page in pages() for block in blocks(page) if block.language == "python"}
    commands = (command for page in pages() for block in blocks(page) for command in _commands(block))
    return found | {" ".join(shlex.split(command.text, comments=True)) for command in commands}


def _commands(block: Block) -> Iterable[Command]:
    return block.commands() if block.language in ("sh", "console") else ()


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_block_does_what_its_page_says(shard: int, tmp_path: Path, masked: None) -> None:
    """All blocks run with the fast clock, in several processes, without the user's settings or emulated machines.

    They share the masked runtime of all tests, because it takes long to make. test_with_tools.py runs the pages that
    need other tools.
    """
    if (home() / FOLDER).is_dir():
        (tmp_path / "edgeq" / "emulate").mkdir(parents=True)
        (tmp_path / "edgeq" / "emulate" / FOLDER).symlink_to(home() / FOLDER)
    fast = Path(__file__).parent / "fast_clock"
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, (fast, REPOSITORY, REPOSITORY / "targets" / "runtime"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    names = [str(page.relative_to(REPOSITORY)) for page in pages()[shard::SHARDS] if installation(page) is None]
    command = [sys.executable, "-m", "tests.docs.run_pages", *names]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **own}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_task_pages_show_examples() -> None:
    """The pages of tasks have a block for every 250 words."""
    scarce = {
        str(page.relative_to(REPOSITORY)): words
        for page in pages()
        if page.parent.name != "reference" and page.stem not in EXPLANATIONS
        if (words := count_words(page) / max(len(blocks(page)), 1)) > MOST_WORDS
    }
    assert not scarce, f"put an example in, or cut words: {scarce}"


def test_every_block_says_what_it_is() -> None:
    unknown = [f"{b.page}:{b.line}" for page in pages() for b in blocks(page) if b.language not in LANGUAGES]
    assert not unknown, f"give these fences one of {LANGUAGES}: {unknown}"


def test_outputs_are_below_their_commands() -> None:
    """Only the outputs in `console` blocks are compared with those of a run. Pages in docs/with have their own test."""
    texts = [b for p in pages() if p.parent.name != "with" for b in blocks(p) if b.language == "text"]
    bare = [f"{b.page}:{b.line}" for b in texts if OUTPUT.search(b.text)]
    assert not bare, f"show each output as `console`, below its command: {bare}"


def test_listed_exceptions_are_on_the_pages() -> None:
    assert {*NOT_RUN, *NOT_COMPARED} - typed() == set()


def parsed(words: list[str]) -> str:
    """Return the parser's error for a command line, or "" if the command and its options exist. Ignore values."""
    command: click.Command = group
    context = click.Context(group)
    try:
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name, found, words = command.resolve_command(context, words)
            assert found is not None
            command, context = found, click.Context(found, parent=context, info_name=name)
        command.make_parser(context).parse_args(list(words))
    except click.BadOptionUsage:
        return ""  # the text names an option without its value
    except (click.UsageError, UsageError) as error:
        return str(error)
    return ""


def test_the_parser_is_strict() -> None:
    assert parsed(["quantise", "model.onnx"]) != ""
    assert parsed(["quantize", "--colour", "red"]) != ""
    assert parsed(["profiles", "show", "--why"]) == ""


@pytest.mark.parametrize("line", sorted(NOT_RUN))
def test_listed_commands_exist(line: str) -> None:
    words = line.split()
    if words[0] == "edgeq":
        assert parsed(words[1:]) == ""
    elif words[0].startswith("scripts/"):
        assert (REPOSITORY / words[0]).is_file()
        if words[0] == "scripts/benchmark":
            assert (REPOSITORY / "benchmarks" / f"{words[1]}.py").is_file()
    elif words[:2] == ["pip", "install"]:
        assert {name for found in re.findall(r"\[(.*)\]", line) for name in found.split(",")} <= EXTRAS.keys()


def test_commands_in_the_text_exist() -> None:
    """The command and the options in each code span that begins with `edgeq COMMAND` exist."""
    wrong = []
    for page in pages():
        for line, span in spans(page):
            words = span.split()
            if words[:1] == ["edgeq"] and words[1:] and re.fullmatch(r"[a-z-]+", words[1]):
                problem = parsed([word for word in words[1:] if not PLACEHOLDER.search(word)])
                if problem:
                    wrong.append(f"{page.relative_to(REPOSITORY)}:{line}: `{span}`: {problem}")
    assert not wrong, "\n".join(wrong)


def test_the_install_page_lists_every_extra_for_users() -> None:
    listed = re.findall(r"^\| `([\w-]+)` \|", (REPOSITORY / "docs" / "install.md").read_text("utf-8"), re.MULTILINE)
    assert set(listed) == EXTRAS.keys() - {"docs", "dev"}


def test_every_page_is_in_the_index() -> None:
    """Every page is in a table of contents of docs/index.md. The build of the site checks this too."""
    text = (REPOSITORY / "docs" / "index.md").read_text("utf-8")
    listed = {
        line.strip() for block in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL) for line in block.split("\n")
    }
    there = {str(page.relative_to(REPOSITORY / "docs").with_suffix("")) for page in pages() if page.name != "README.md"}
    assert there - {"index"} - listed == set()
