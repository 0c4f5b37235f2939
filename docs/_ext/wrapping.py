"""Mark the parts of commands and outputs that must not wrap: options, because browsers break a line after any hyphen,
and lines with columns.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

COMMANDS = re.compile(r'<div class="highlight-(?:sh|console) .*?</pre>|<code .*?</code>', re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*(?=[\s<=])")
COLUMNS = re.compile(r'(?<=<span class="go)(?=">[^<]*(?:[│┃━─]|\S {2,}\S))')
TAG = re.compile(r"(<[^>]*>)")


def mark(block: re.Match[str]) -> str:
    """Return a block or a span of code with marked options and lines."""
    # Looking past a tag's edge, OPTION sees the tag: only texts are searched, each with the character that follows it.
    parts = TAG.split(COLUMNS.sub(" columns", block[0]))
    parts[::2] = [OPTION.sub(r'<span class="whole">\g<0></span>', text + "<")[:-1] for text in parts[::2]]
    return "".join(parts)


def mark_options(app: Sphinx, page: str, template: str, context: dict[str, Any], document: object) -> None:
    """Mark the options of one page."""
    if "body" in context:
        context["body"] = COMMANDS.sub(mark, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension to Sphinx."""
    app.connect("html-page-context", mark_options)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
