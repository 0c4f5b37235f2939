"""Run the blocks of pages as they are, each page in a folder of its own, from top to bottom.

Type `python -m tests.docs.run_pages docs/quantize.md` in the root of the repository, or leave the name out for all
pages. It prints the failed blocks with their places. The exit code is their number.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner

from edgeq.cli import group
from edgeq.errors import CheckFailedError, GoalNotMetError
from tests.docs.blocks import REPOSITORY, Block, Command, blocks, pages
from tests.docs.exceptions import NOT_COMPARED, NOT_RUN, is_left_out
from tests.docs.plugin import install_as_a_package
from tests.docs.printed import find_difference
from tests.docs.stand_ins import STAND_INS
from tests.docs.toml_readers import read_by_one
from tests.one_thread import one_thread

WRITERS = {"quantize": 2, "package": 2, "tune": 2, "calibrate": 2, "retarget": 1, "report": 1}
"""Function → the position of its output among its arguments."""
OUTPUTS = {"-o", "--output", "--output_model_path", "--output_model", "--files"}
SLOW_S = 2.0
SHELL = re.compile(r"[|<>&;$]")


class FailedError(Exception):
    """Report a block that does not do what its page says."""


class PageRun:
    """Run one page in its folder.

    If a line needs a file that no earlier line made, a stand-in with that name is put there first.
    """

    def __init__(self, folder: Path, made: Path) -> None:
        self.folder, self.made = folder, made
        self.names: dict[str, Any] = {"__name__": "page"}
        self.installed = False

    def run(self, block: Block) -> None:
        """Write, execute or check one block.

        Raises:
            FailedError: the block failed; the text names the page, the line and the fault.
        """
        if block.text.partition("\n")[0] in NOT_RUN and block.language == "python":
            return
        if block.language in ("sh", "console"):
            for command in block.commands():
                began, place = _cpu(), f"{block.page}:{command.line}: {command.text.strip()}"
                with _named(place):
                    self.command(command)
                if _cpu() - began > SLOW_S:
                    print(f"{place}: {_cpu() - began:.1f} s of CPU")
            return
        with _named(f"{block.page}:{block.line}: {block.language} block"):
            if block.file:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, "utf-8")
                if path.name == "pyproject.toml":
                    install_as_a_package(self.folder, path)
                    os.environ["PYTHONPATH"] = os.pathsep.join((str(self.folder), os.environ["PYTHONPATH"]))
                    self.installed = True
            if block.language == "python":
                self.python(block)
            elif block.language == "toml":
                read_by_one(self.folder / (block.file or "page.toml"), block.text)
            elif block.language == "json":
                json.loads(block.text)

    def python(self, block: Block) -> None:
        """Execute a Python block as a script would. Blocks of a page share their names, but files run alone."""
        tree = ast.parse(block.text)
        written = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITERS:
                written |= {arg.value for arg in node.args[WRITERS[node.func.attr] :] if isinstance(arg, ast.Constant)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in written:
                self.provide(node.value)
        with contextlib.redirect_stdout(io.StringIO()):
            if block.file:
                runpy.run_path(str(self.folder / block.file), run_name="file_of_the_page")
            else:
                exec(compile(tree, f"{block.page}:{block.line}", "exec"), self.names)

    def command(self, command: Command) -> None:
        """Run one command line, and compare its output with the page's."""
        text, words = command.text, shlex.split(command.text, comments=True)
        line = " ".join(words)
        if is_left_out(line):
            return
        output = ""
        for before, word in zip(["", *words], words, strict=False):
            if before not in OUTPUTS:
                self.provide(word)
        if words[0] == "cd":
            os.chdir(words[1])
        elif words[0] == "edgeq" and not self.installed and not SHELL.search(text.partition("#")[0]):
            ran = CliRunner().invoke(group, words[1:], prog_name="edgeq")
            # On a busy machine a small model may not be faster in int8. These two commands then end with an error.
            met = (words[1] == "tune" and ran.exit_code == GoalNotMetError.exit_code) or (
                {"--min-speedup", "run"} & set(words) and ran.exit_code == CheckFailedError.exit_code
            )
            output = ran.output
            fails = any(line.startswith("edgeq: ") for line in command.shown)
            _done(0 if met or fails else ran.exit_code, output, ran.exception)
        elif words[:2] == ["python", "-m"] and words[2].startswith("edgeq."):
            _module(words[2], words[3:])
        else:
            done = subprocess.run(
                ["bash", "-c", text], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=300
            )
            output = done.stdout + done.stderr
            _done(done.returncode, output, None)
        if command.shown and line not in NOT_COMPARED:
            # Only the demo model is the one that the page is about; the others are stand-ins.
            difference = find_difference(command.shown, output, numbers="digits" in text)
            if difference:
                raise FailedError(difference)

    def provide(self, word: str) -> None:
        """Put the stand-in called `word` into the page's folder, if there is one and the folder does not contain it."""
        path = Path(word.rpartition("=")[2])
        name = next((str(p) for p in (path, *path.parents) if str(p) in STAND_INS), None)
        if name is None or (self.folder / name).exists():
            return
        made = self.made / name.replace("/", "_").replace("*", "_")
        if not made.exists():
            made.mkdir()
            STAND_INS[name](made)
        shutil.copytree(made, self.folder, dirs_exist_ok=True)


def _module(name: str, arguments: list[str]) -> None:
    """Run `python -m name arguments` in this process."""
    output, code, error = io.StringIO(), 0, None
    held, sys.argv = sys.argv, [name, *arguments]
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            warnings.catch_warnings(),
            # a forked child would also run the later pages
            mock.patch("edgeq.util.process.confine", return_value=None),
        ):
            warnings.filterwarnings("ignore", "'edgeq.compat.* found in sys.modules", RuntimeWarning)
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as found:
        code, error = 1, found
    finally:
        sys.argv = held
    _done(code, output.getvalue(), error)


def _done(code: int, output: str, error: BaseException | None) -> None:
    if code:
        shown = "" if error is None or isinstance(error, SystemExit) else "".join(traceback.format_exception(error))
        raise FailedError(f"exit {code}\n{output[-1500:]}{shown}")


@contextlib.contextmanager
def _named(place: str) -> Iterator[None]:
    try:
        yield
    except FailedError as error:
        raise FailedError(f"{place}\n    {str(error).strip()}") from error
    except Exception as error:
        raise FailedError(f"{place}\n{traceback.format_exc()}") from error


@contextlib.contextmanager
def _restored(folder: Path) -> Iterator[None]:
    """Enter `folder`, and afterwards restore the parts of the process that a page may change."""
    variables = dict(os.environ)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    modules = set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(REPOSITORY)
        os.environ.clear()
        os.environ.update(variables)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]
        if cores is not None:
            os.sched_setaffinity(0, cores)


def _cpu() -> float:
    """Return the seconds of CPU that this process and its children have used, by the real clock."""
    return sum(os.times()[:4])


def run_page(page: Path, made: Path, *, say: Callable[[str], None]) -> int:
    """Run the blocks of a page, pass failures to `say`, and return their number."""
    failed, began = 0, _cpu()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        with _restored(folder):
            run = PageRun(folder, made)
            for block in blocks(page):
                try:
                    run.run(block)
                except FailedError as error:
                    say(str(error))
                    failed += 1
    say(f"{page.relative_to(REPOSITORY)}: {failed} failed, {_cpu() - began:.1f} s of CPU")
    return failed


def main(arguments: list[str]) -> int:
    """Run the named pages, or all pages, and return the number of failures."""
    named = [REPOSITORY / name for name in arguments] or pages()
    one_thread()
    os.environ["BROWSER"] = "true"
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    with tempfile.TemporaryDirectory() as made:
        return sum(run_page(page, Path(made), say=print) for page in named)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
