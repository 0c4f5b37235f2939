"""Find every code block, command line and code span of the README and the pages."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).resolve().parents[2]
LANGUAGES = ("sh", "console", "python", "toml", "json", "js", "text")
"""`console` holds commands after "$ " and what they print; `text` is a formula, a format, or a part of an output."""


@dataclass(frozen=True)
class Command:
    """Hold a command line.

    Attributes:
        line: number of its first line in the page.
        shown: the output that the page shows below it; empty if the page shows none.
    """

    line: int
    text: str
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """Hold a fenced or indented block.

    Attributes:
        page: path of the page, relative to the repository.
        line: number of the block's first line in the page, counted from 1.
        language: language of the fence; "" if it has none.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """Return the name of the file that the block shows, from a first line such as `# prepare.py`, or None."""
        found = re.match(r"# ([\w./-]+\.\w+)\n", self.text)
        return found[1] if found and self.language in ("python", "toml", "json") else None

    def commands(self) -> Iterator[Command]:
        """Yield each command, with continued lines joined and comments left out, and the output that is shown below."""
        lines = self.text.splitlines()
        starts = [number for number, line in enumerate(lines) if self.language != "console" or line.startswith("$ ")]
        held, began = "", 0
        for number, after in itertools.pairwise([*starts, len(lines)]):
            if not held:
                began = number
            end = number
            while lines[end].endswith("\\") and end + 1 < after:
                end += 1
            held += "".join(line.removesuffix("\\") for line in lines[number : end + 1]).removeprefix("$ ")
            if lines[end].endswith("\\"):
                continue
            if shlex.split(held, comments=True):
                yield Command(self.line + began, held, tuple(lines[end + 1 : after]))
            held = ""


def pages() -> list[Path]:
    """Return the paths of the README and all pages."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order, without the site generator's directives."""
    name = page.relative_to(REPOSITORY).as_posix()
    found = []
    for token in _tokens(page):
        if token.type in ("fence", "code_block") and token.map and not token.info.startswith("{"):
            line = token.map[0] + (2 if token.type == "fence" else 1)
            found.append(Block(name, line, token.info.strip(), token.content))
    return found


def installation(page: Path) -> str | None:
    """Return the `pip install` line of a page of docs/with whose commands need other tools, or None."""
    first = next((block.text.strip() for block in blocks(page) if block.language == "sh"), "")
    return first if page.parent.name == "with" and first.startswith("pip install ") else None


def spans(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every code span."""
    for token in _tokens(page):
        for child in token.children or ():
            if child.type == "code_inline":
                yield (token.map or [0])[0] + 1, child.content


def count_words(page: Path) -> int:
    """Return the number of words outside the blocks."""
    return sum(len(token.content.split()) for token in _tokens(page) if token.type == "inline")


def _tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text("utf-8"))
