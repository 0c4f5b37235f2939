"""End the program with an exit code and one line on stderr, whatever went wrong.

0        success
1        a bug in edgeq
2 to 14  see edgeq/errors.py; 2 is also click's code for an option that makes no sense, and the code for an error in a
         user's file or in a plug-in
129      the terminal was closed
130      interrupted (Ctrl-C)
141      the reader of the output closed it (`edgeq profiles | head`); edgeq prints no message
143      terminated
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click
from edgeq_device.system.budget import Budget, Endings, confine
from edgeq_device.system.programs import build_child_environment
from edgeq_device.system.relay import escape, hide_passwords, prepare_output

from edgeq.arguments import as_options
from edgeq.errors import BudgetError, EdgeqError, OutputError, UsageError, no_threads
from edgeq.util.device_errors import device_errors
from edgeq.util.registry import find_plugin
from edgeq.util.user_code import describe_error, find_place

BUG = 1
INTERRUPTED = 128 + signal.SIGINT
_INTERRUPTED_LINE = "interrupted; nothing half-written was left behind"
READER_GONE = 128 + 13  # SIGPIPE, a name that Windows lacks
TERMINATED = 128 + signal.SIGTERM
TERMINAL_GONE = 128 + 1  # SIGHUP, a name that Windows lacks

_FULL = (errno.ENOSPC, errno.EDQUOT)
_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
# These errors mean that the machine lacks a resource. Any other OSError that reaches this module is a bug in edgeq.
_EXHAUSTED = frozenset({*_FULL, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.EFBIG})

endings = Endings()


def begin() -> Budget | None:
    """Start a program. The inputs may be hostile, so the program continues in a child process under the limits of a
    budget.

    Returns:
        The limits, or None if there are no limits.
    """
    with ends_in_one_line(), device_errors():
        budget = confine("edgeq")
    endings.unwind()  # needed so that temporary files are removed even if a signal ends the program
    # Without this setting, onnxruntime's wheels send usage data to their maker. On devices,
    # targets/runtime/edgeq_run.py sets it.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    # Libraries start programs too (`platform` starts uname), and may find them through PATH.
    os.environ.update(build_child_environment())
    return budget


def check_threads() -> None:
    """Check that the system can start as many threads as numpy starts when it is imported. If numpy's BLAS
    library could not start a thread, it would interrupt the program.

    Raises:
        RuntimeError: the system refuses to start more threads.
    """
    named = next((os.environ[name] for name in _THREADS if os.environ.get(name, "").isdecimal()), "")
    release, started = threading.Event(), []
    try:
        for _ in range(int(named or os.cpu_count() or 1) - 1):
            thread = threading.Thread(target=release.wait)
            thread.start()
            started.append(thread)
    finally:
        release.set()
        for thread in started:
            thread.join()


@contextmanager
def ends_in_one_line(*, verbose: bool = False) -> Iterator[None]:
    """On any error in the `with` block, print one line on stderr and end the program with the exit code. With
    `verbose`, also print the traceback of a bug.
    """
    prepare_output()
    try:
        try:
            yield
        except BaseException:
            endings.close()
            raise
    except EdgeqError as error:
        _end(as_options(error.text), error.exit_code)
    except click.UsageError as error:
        _end_usage(error)
    except click.ClickException as error:
        _end(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _end(_INTERRUPTED_LINE, INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout is gone, so Python must not try to write the buffered output again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_GONE)
    except MemoryError:
        _end("memory ran out. Give smaller inputs, or set EDGEQ_BUDGET (docs/security.md)", BudgetError.exit_code)
    except (OSError, RuntimeError) as error:
        lacks = _lacking(error)
        if lacks is None:
            _end_unforeseen(error, verbose=verbose)
        _end(as_options(lacks.text), lacks.exit_code)
    except Exception as error:
        _end_unforeseen(error, verbose=verbose)


def _lacking(error: OSError | RuntimeError) -> EdgeqError | None:
    """Return an edgeq error that names the resource that the system lacks, or None if the error has another cause."""
    if isinstance(error, RuntimeError):
        return no_threads() if "start new thread" in str(error) else None
    if error.errno == errno.EAGAIN:
        return no_threads()
    if error.errno == errno.ENOMEM:
        return BudgetError("the system has no memory left", "End other programs, or give smaller inputs")
    if error.errno in _FULL or (error.errno == errno.ENOENT and error.filename is None):
        from edgeq.util.outputs import is_full, work_folder

        work = work_folder()
        if work is None:
            return OutputError("no folder for work files can be written", "Set TMPDIR to one")
        named = error.filename is not None and os.path.realpath(error.filename).startswith(os.path.realpath(work))
        if error.errno in _FULL and (named or (error.filename is None and is_full(work))):
            return OutputError(f"no space left in {work} for work files", "Free some space, or set TMPDIR")
    if error.errno not in _EXHAUSTED:
        return None
    return OutputError(f"{error.filename or 'standard output'}: {error.strerror}")


def _end_unforeseen(error: Exception, *, verbose: bool) -> NoReturn:
    if verbose:
        lines = hide_passwords(traceback.format_exc()).splitlines()
        click.echo("\n".join(map(escape, lines)), err=True)
    text, fix = describe_error(error)
    hint = "the traceback is above" if verbose else "run it with -v for the traceback"
    if find_place(error):
        _end(f"{text}. {fix} ({hint})", UsageError.exit_code)
    if plugin := find_plugin(error):
        _end(f"{text}. Report it to the authors of {plugin} ({hint})", UsageError.exit_code)
    _end(f"{text}. This is a bug in edgeq: please report it ({hint})", BUG)


def _end_usage(error: click.UsageError) -> NoReturn:
    """Print click's three-line message as one line. If no command was given, print the help."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        sys.exit(error.exit_code)
    text = " ".join(error.format_message().split()).rstrip(".")
    if error.ctx is not None:
        end = " " if text.endswith("?") else ". "
        text = f"{text}{end}See `{error.ctx.command_path} {error.ctx.help_option_names[-1]}`"
    _end(text, error.exit_code)


def _end(line: str, code: int) -> NoReturn:
    if endings.number == signal.SIGINT:
        line, code = _INTERRUPTED_LINE, INTERRUPTED
    elif endings.number:
        sys.exit(128 + endings.number)
    click.echo(escape(hide_passwords(f"edgeq: {line}")).replace("\u202f", " "), err=True)
    sys.exit(code)
