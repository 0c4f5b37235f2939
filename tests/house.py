"""Count the places in the source that keep a reader out: names without a noun, long parameter lists, silent packages.

Each function returns the places that it counts, as texts for a message. A count is a reason to look; a reader judges.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = (REPOSITORY / "edgeq", REPOSITORY / "targets" / "runtime")
TESTS = REPOSITORY / "tests"

# Words that describe a value without saying what it is.
NO_NOUNS = """
    found made one own known kept there here held how others other left given taken whole read written same
    what which each many few least most before after first last again then wanted needed counted chosen shown
    tried seen meant asked judged shared opened told put done beside apart plain rest enough alike near far
    still back where
    """
# A relative clause without the noun that it describes.
HEADLESS = re.compile(r"test_(only_|places_)?(what|which|whether|where|who|how|of|that|those)(_|$)")
# Files that call or name other programs, whose long options appear there: pip, apt, dpkg, qemu, objdump, Vela,
# tf2onnx, and the older calibrate.py. arguments.py is the table of edgeq's own options.
CALLERS = {
    "edgeq/arguments.py",
    "edgeq/backends/litert/ethosu.py",
    "edgeq/emulate/machine.py",
    "edgeq/emulate/routes.py",
    "edgeq/emulate/sysroot.py",
    "edgeq/model/file_type.py",
    "edgeq/prove/builds.py",
    "edgeq/quantization/quantizer.py",
    "edgeq/remote/setup.py",
    "edgeq/remote/verify.py",
    "edgeq/run/toolkit.py",
}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# The command line, and the names and arguments that onnxruntime chose.
OUTERMOST = ("edgeq/cli/", "edgeq/compat/")
# Below this number of lines, a helper without a link to its file is not an idea of its own.
LINES_OF_AN_IDEA = 12
LONG_LIST = 12
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def source_files() -> list[Path]:
    return sorted(path for root in SOURCES for path in root.rglob("*.py") if "_shipped" not in path.parts)


def files_below_cli() -> list[Path]:
    return [path for path in source_files() if not relative(path).startswith(OUTERMOST)]


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, the module first. Each file is parsed once for all rules."""
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"), str(path))))


def module(path: Path) -> ast.Module:
    root = nodes(path)[0]
    assert isinstance(root, ast.Module)
    return root


def names_without_a_noun() -> tuple[list[str], int]:
    """Return the places where a name such as `found` gets a value, and the number of all such places."""
    places, total, words = [], 0, set(NO_NOUNS.split())
    for path in source_files():
        for node in nodes(path):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                total += 1
                if node.id.lstrip("_") in words:
                    places.append(f"{relative(path)}:{node.lineno} {node.id}")
    return places, total


def classes_defined_twice() -> dict[str, list[str]]:
    """Return the places of each class name that several classes have."""
    places = defaultdict(list)
    for path in source_files():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{relative(path)}:{node.lineno}")
    return {name: texts for name, texts in places.items() if len(texts) > 1}


def long_parameter_lists() -> list[str]:
    """Return the functions below the command line with 12 parameters or more, not counting `self`."""
    places = []
    for path in files_below_cli():
        for node in nodes(path):
            if isinstance(node, FUNCTIONS):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                if count >= LONG_LIST:
                    places.append(f"{relative(path)}:{node.lineno} {node.name}: {count}")
    return places


def lines_with_options() -> list[str]:
    """Return the lines of edgeq below the command line that contain an option such as --data.

    The lines of `CALLERS` do not count: these files write the options of other programs.
    """
    return [
        f"{relative(path)}:{number} {line.strip()}"
        for path in files_below_cli()
        if relative(path).startswith("edgeq/") and relative(path) not in CALLERS
        for number, line in enumerate(path.read_text("utf-8").split("\n"), 1)
        if OPTION.search(line)
    ]


def share_of_comments() -> float:
    """Return the number of comments for each line of code. Docstrings and blank lines are not code."""
    comments = lines = 0
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for path in source_files():
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            if token.type == tokenize.COMMENT:
                comments += 1
            elif token.type not in layout:
                code.update(range(token.start[0], token.end[0] + 1))
        lines += len(code - docstring_lines(path))
    return comments / lines


def docstring_lines(path: Path) -> set[int]:
    lines: set[int] = set()
    for node in nodes(path):
        if (
            isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module))
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def count_ideas(tree: ast.Module) -> int:
    """Return the number of groups of definitions in a file that do not refer to each other.

    A group needs a function or a class, and 12 lines.
    """
    statements: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            statements[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            statements |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    group_of = {name: {name} for name in statements}
    for name, node in statements.items():
        # Texts count as references too, because annotations may be written as texts.
        references = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        references |= {str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)}
        for reference in references & statements.keys():
            group = group_of[name] | group_of[reference]
            group_of |= dict.fromkeys(group, group)
    lines: Counter[frozenset[str]] = Counter()
    for name, node in statements.items():
        lines[frozenset(group_of[name])] += (node.end_lineno or node.lineno) - node.lineno + 1
    constants = {name for name, node in statements.items() if isinstance(node, (ast.Assign, ast.AnnAssign))}
    return sum(count >= LINES_OF_AN_IDEA and not group <= constants for group, count in lines.items())


def files_of_several_ideas() -> list[str]:
    """Return the files with three ideas or more."""
    counts = {relative(path): count_ideas(module(path)) for path in source_files()}
    return [f"{path}: {count}" for path, count in counts.items() if count >= 3]


def silent_packages() -> list[str]:
    """Return the packages whose `__init__.py` does not say what they are for."""
    return [
        relative(path) for path in source_files() if path.name == "__init__.py" and not ast.get_docstring(module(path))
    ]


def headless_test_names() -> list[str]:
    """Return the tests whose names say "what is done" without saying which thing does what."""
    return [
        f"{relative(path)}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
        if HEADLESS.match(name)
    ]
