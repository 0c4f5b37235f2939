"""Prose in the field's terms: docstrings, comments, messages, help texts and pages use none of these metaphors."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
METAPHORS = re.compile(
    r"\b(rooms?|houses?|floors?|doors?|strangers?|faces?|blam(?:e|es|ed|ing)|culprits?|witness(?:es|ed)?|workshops?"
    r"|outlooks?|rescu(?:e|es|ed|ing)|movers?|remed(?:y|ies)|surroundings|told|foretells?|foretold|said"
    r"|(?:is|are) asked)\b",
    re.IGNORECASE,
)
# Most files hold none of the words, and reading Python takes a while; "is asked" may stand on two lines.
MAYBE = re.compile(METAPHORS.pattern.replace("(?:is|are) ", ""), METAPHORS.flags)
ESCAPE = re.compile(r"\\[a-z]")
# Rounding down is called floor, as in numpy.
ALLOWED = ("floor(", "floor|round|ceil", "floor\\|round\\|ceil", "floor, ceil", "defaults to floor")


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of every comment, docstring and string of several words; keys of formats are one word."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def lines_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of every line that is not a code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith("    "):
            yield number, line


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """The same without the code spans."""
    return ((number, re.sub(r"`[^`]*`", "", line)) for number, line in lines_of_page(text))


def metaphors(path: Path) -> list[str]:
    """`FILE:LINE: WORD` for each one in a file; docstrings and strings count lines from where they begin."""
    text = path.read_text("utf-8")
    if not MAYBE.search(ESCAPE.sub(" ", text)):
        return []
    if path.suffix == ".py":
        parts = prose_of_python(text)
    elif path.suffix == ".md":
        parts = prose_of_page(text)
    else:
        parts = iter(enumerate(text.splitlines(), 1))
    found = []
    for number, part in parts:
        for allowed in ALLOWED:
            part = part.replace(allowed, "")
        for match in METAPHORS.finditer(part):
            line = number + part.count("\n", 0, match.start())
            found.append(f"{path.relative_to(REPOSITORY)}:{line}: {match.group()}")
    return found


def names(path: Path) -> list[str]:
    """`FILE: NAME` for each function or class of a file that has one in its name."""
    defined = re.findall(r"^ *(?:async )?(?:def|class) (\w+)", path.read_text("utf-8"), re.MULTILINE)
    return [f"{path.relative_to(REPOSITORY)}: {name}" for name in defined if METAPHORS.search(name.replace("_", " "))]


def files() -> list[Path]:
    folders = ("edgeq", "targets", "tests", "benchmarks", "scripts", "fuzz")
    code = [p for folder in folders for p in (REPOSITORY / folder).rglob("*.py") if p != Path(__file__).resolve()]
    data = [p for folder in ("targets", "profiles") for p in (REPOSITORY / folder).rglob("*.toml")]
    pages = [*(REPOSITORY / "docs").rglob("*.md"), *REPOSITORY.glob("*.md")]
    return sorted((*code, *data, *pages))


def test_prose_is_plain() -> None:
    found = [line for path in files() for line in metaphors(path)]
    found += [line for path in files() if path.suffix == ".py" for line in names(path)]
    assert not found, "say it in the field's terms:\n" + "\n".join(found)


def test_pages_are_wrapped() -> None:
    """At 120 characters; tables and code keep their lines."""
    long = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in files()
        if path.suffix == ".md"
        for number, line in lines_of_page(path.read_text("utf-8"))
        if len(line) > 120 and not line.startswith("|")
    ]
    assert not long, f"wrap {', '.join(long)}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""The upper floor."""'),
        ("a.py", "x = 1  # a stranger's file"),
        ("a.py", 'print(f"the engine is told {1}")'),
        ("a.py", 'print("in two\\nrooms")'),
        ("a.py", 'print("it is "\n"asked")'),
        ("a.md", "The door is open."),
    ],
)
def test_metaphors_are_found(name: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(f"{__name__}.REPOSITORY", tmp_path)
    (tmp_path / name).write_text(text, "utf-8")
    assert metaphors(tmp_path / name)


def test_metaphors_in_names_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(f"{__name__}.REPOSITORY", tmp_path)
    (tmp_path / "a.py").write_text("class Kept:\n    def is_told(self) -> None: ...\n", "utf-8")
    assert names(tmp_path / "a.py") == ["a.py: is_told"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", 'keys = {"culprits": 1, "remedies": 2}'),
        ("a.py", '"""The latency at floor(p x n)."""'),
        ("a.md", "Run `benchmark --only rescue`, or\n\n    cd house\n"),
    ],
)
def test_keys_and_code_are_left_alone(name: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(f"{__name__}.REPOSITORY", tmp_path)
    (tmp_path / name).write_text(text, "utf-8")
    assert not metaphors(tmp_path / name)
