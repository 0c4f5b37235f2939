"""Write one page for each command, and provide `{commands}`, the list of these pages in the groups of `edgeq --help`.

A page is the command's own `--help`, with the help's headings and with an anchor for each option.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from edgeq.cli import COMMANDS, FILES, GROUPS, SHOWN, group

FOLDER = "reference/commands"
# Tests, reviewers and GitHub read the *.md files of docs/. These pages are Markdown too, but git ignores them.
SUFFIX = ".markdown"
OPTION = re.compile(r"(?<![\w`-])--?[a-z][\w-]*")
EXAMPLES = "\b\n"
"""click's mark of a paragraph whose lines it keeps; in edgeq's help texts these are examples."""


class MarkdownHelp(click.HelpFormatter):
    """Format a command's help as Markdown.

    Args:
        path: words that call the command.
        level: level of the page's heading for this command.
    """

    def __init__(self, path: str, level: int) -> None:
        super().__init__(width=10_000)
        self.path, self.level = path, level

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write the usage as a block, and name the program that the following options belong to."""
        self.write(f"```text\n{prog} {args}\n```\n\n```{{program}} {self.path}\n```\n\n")

    def write_heading(self, heading: str) -> None:
        """Write a heading."""
        self.write(f"{'#' * (self.level + 1)} {heading}\n\n")

    def write_paragraph(self) -> None:
        """End a paragraph."""
        self.write("\n")

    def write_text(self, text: str) -> None:
        """Write paragraphs, and examples as a block with a copy button."""
        for paragraph in text.split("\n\n"):
            if paragraph.startswith(EXAMPLES):
                self.write(f"```sh\n{paragraph.removeprefix(EXAMPLES)}\n```\n\n")
            else:
                self.write(f"{escaped(paragraph)}\n\n")

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write options with their anchors, or commands as a table."""
        for name, text in rows:
            if name.startswith("-"):
                self.write(f"```{{option}} {name}\n{escaped(text)}\n```\n\n")
        if commands := [(name, text) for name, text in rows if not name.startswith("-")]:
            self.write(table((f"`{name}`", escaped(text)) for name, text in commands))

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Write a heading, and the rows of the section below it."""
        self.write_heading(name)
        yield
        self.write_paragraph()


def escaped(text: str) -> str:
    """Return a help text with its options as code, and without characters that Markdown would read as marks."""
    parts = text.split("`")
    parts[::2] = [
        OPTION.sub(r"`\g<0>`", part.replace("*", r"\*").replace("<", r"\<").replace("|", r"\|")) for part in parts[::2]
    ]
    return "`".join(parts)


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Return a Markdown table of commands."""
    return "\n".join(["| command | does |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows), "", ""])


def describe(command: click.Command, parent: click.Context, name: str, level: int = 1) -> str:
    """Return a command's help, and that of its subcommands, as Markdown."""
    context = click.Context(command, parent=parent, info_name=name)
    formatter = MarkdownHelp(context.command_path, level)
    command.format_help(context, formatter)
    text = f"{'#' * level} {context.command_path}\n\n{formatter.getvalue()}"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            text += describe(inner, context, name, level + 1)
    return text


def write(app: Sphinx) -> None:
    """Write the pages, before Sphinx looks for pages. A page whose text is the same keeps its time."""
    folder = Path(app.srcdir, FOLDER)
    folder.mkdir(exist_ok=True)
    context = click.Context(group, info_name="edgeq")
    texts: dict[Path, str] = {}
    for name in COMMANDS:
        command = group.get_command(context, name)
        assert command is not None
        texts[folder / f"{name}{SUFFIX}"] = describe(command, context, name)
    for page in set(folder.iterdir()) - texts.keys():
        page.unlink()
    for page, text in texts.items():
        if not page.exists() or page.read_text("utf-8") != text:
            page.write_text(text, "utf-8")


class Commands(SphinxDirective):
    """Insert a table of commands for each group of `edgeq --help`, and then the commands that it does not show."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes; Sphinx calls this."""
        sections: dict[str, list[str]] = {}
        for title, names in SHOWN.items():
            sections[title] = [name for name in names if name not in GROUPS]
            sections |= {f"{title}: {name}": list(FILES[name]) for name in names if name in GROUPS}
        listed = {name for names in sections.values() for name in names}
        sections["More commands"] = [name for name in COMMANDS if name not in listed]
        text = ""
        for title, names in sections.items():
            rows = table((f"{{doc}}`{name} </{FOLDER}/{name}>`", escaped(COMMANDS[name])) for name in names)
            links = "\n".join(f"/{FOLDER}/{name}" for name in names)
            text += f"## {title}\n\n{rows}```{{toctree}}\n:hidden:\n\n{links}\n```\n\n"
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension to Sphinx."""
    app.add_source_suffix(SUFFIX, "markdown")
    app.add_directive("commands", Commands)
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
