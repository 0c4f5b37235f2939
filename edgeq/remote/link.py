"""Commands on a board through the system's ssh, with what people have configured for it: keys, agents, jump hosts and
known host keys. Its failures are one line each.

Limits on what a board, which is not trusted, may send, and on how long it may take.

Code takes each from this module when it needs it (`bounds.ANSWER_S`), so that there is one place to change it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Annotated, TypeVar

from edgeq_device.budget import largest_sample
from edgeq_device.frames import FrameLimits
from edgeq_device.relay import Tail, printable
from msgspec import Meta

from edgeq.emulate.apt import which
from edgeq.errors import BoardError
from edgeq.remote.devices import Board

T = TypeVar("T")
_STOP_S = 1.0


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Return what `call` returns. It runs in a thread, because reading from a pipe or writing to it may take for ever.

    Raises:
        TimeoutError: it takes longer. The thread ends as soon as the process at the other end of the pipe does.
    """
    found: Future[T] = Future()

    def work() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=work, daemon=True).start()
    return found.result(limit_s)


def start(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Tail]:
    """Start a process; gives it with the end of what it writes on stderr."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    return process, Tail(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap a process, and close its pipes. SIGTERM comes first: then ssh ends what it connects through."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(TimeoutError, OSError):  # a reader that still waits, or what nobody will read
            within(_STOP_S, stream.close)


@dataclass(frozen=True)
class Done:
    """A process that has ended: exit code, standard output, the end of its stderr.

    Attributes:
        out: None where there was too much of it, so that the process was stopped.
    """

    code: int
    out: bytes | None
    errors: bytes


def run_bounded(command: Sequence[str], limit_s: float, most: int, data: bytes = b"") -> Done:
    """Run a command, which `data` is the input of.

    Args:
        most: bytes of standard output.

    Raises:
        TimeoutError: it takes longer than `limit_s`.
    """
    process, errors = start(command)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def talk() -> bytes | None:
        with suppress(BrokenPipeError), stdin:
            stdin.write(data)
        out = stdout.read(most + 1)
        if len(out) > most:
            return None
        process.wait()
        return out

    try:
        out = within(limit_s, talk)
    finally:
        stop(process)
    return Done(process.returncode, out, errors.read())


# Seconds.
ANSWER_S = 120.0
"""For a request to the program that holds the board. Hashing a gigabyte on a slow card takes a minute."""
LEAST_BYTES_PER_S = 1 << 14
"""A request that carries a file has more time, by this rate."""
COMMAND_S = 60.0
"""For sending edgeq's program to the board."""
REQUEST_S = 900.0
"""For a request to the program that runs models: opening a large model on a slow board takes minutes."""
VERIFY_S = 1800.0
"""For the bundle's own runner."""
INSTALL_S = 3600.0
"""For pip on the board."""
BENCH_S = 900.0
"""For what a benchmark does besides its runs: opening, warming up, measuring memory."""
BENCH_FACTOR = 20.0
"""For its runs: this many times their duration."""
ALIVE_S = 15.0
"""Between signs of life to the board, and for it to end what runs there behind a session."""
EXIT_S = 5.0
"""For a process to end after its output has."""

# Bytes and counts.
ANSWER_BYTES = 1 << 21
"""Bytes of one answer, and of the standard output of one command."""
VALUES = 1 << 17
"""Values in one answer: its objects take far more memory than its text."""
ARRAYS = 1 << 12
"""Arrays in one answer."""
SYSTEM_FILES = 1 << 11
KERNELS, KERNEL_VALUES = 1 << 17, 1 << 12
"""Runs of kernels in a profile, and values in each."""
SHOWN = 300
"""Characters of a message of the board's."""
TABLE = 1 << 16
"""Characters of a benchmark's tables."""

_ON_ONE_LINE = r"^[^\n\t]*$"
Line = Annotated[str, Meta(max_length=SHOWN, pattern=_ON_ONE_LINE, description="a short text on one line")]
Text = Annotated[str, Meta(max_length=1 << 12, pattern=_ON_ONE_LINE, description="a text on one line")]
SystemFile = Annotated[str, Meta(max_length=1 << 13, description="a small file of the system")]


def frame_limits(*, arrays: bool) -> FrameLimits:
    """Return the limits of one answer of the program that runs models.

    Args:
        arrays: whether the request asks for any. All of them together take at most half of the budget's `sample`.
    """
    total = largest_sample() // 2 if arrays else 0
    return FrameLimits(text=ANSWER_BYTES, values=VALUES, arrays=ARRAYS, total=total)


def brief(text: object) -> str:
    """Return a text of the board's on one line, cut where it is too long to be read."""
    line = " ".join(str(text)[: 4 * SHOWN].split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"


CONNECT_S = 15
# A link that is silently gone is noticed after three of these.
_ALIVE_S = 10
LINK_FAILED = 255
"""ssh's exit code where it is the link that failed, not the command."""


class Link:
    """How to reach one board.

    Args:
        sockets: a folder for the socket by which all commands share one connection; short, as sockets' paths are.
    """

    def __init__(self, board: Board, sockets: Path) -> None:
        self.board = board
        self._ssh = _ssh()
        shared = ["-o", "ControlMaster=auto", "-o", f"ControlPath={sockets}/%C", "-o", "ControlPersist=no"]
        self._options = [
            *("-T", "-x", "-a"),
            *("-o", "BatchMode=yes"),
            *("-o", f"ConnectTimeout={CONNECT_S}"),
            *("-o", f"ServerAliveInterval={_ALIVE_S}"),
            *("-o", "ServerAliveCountMax=3"),
            # Windows' ssh has no sockets to share a connection by.
            *(shared if os.name == "posix" else ()),
            *(("-p", str(board.port)) if board.port else ()),
            *(("-l", board.user) if board.user else ()),
        ]

    def command(self, script: str, *arguments: str) -> list[str]:
        """The command line that runs a POSIX shell script on the board, whatever its login shell is."""
        words = ["exec", "sh", "-c", shlex.quote(script), "sh", *map(shlex.quote, arguments)]
        return [self._ssh, *self._options, "--", self.board.host, " ".join(words)]

    def failed(self, code: int, errors: bytes) -> BoardError:
        """What a command that failed wrote on stderr, as an error in one line."""
        lines = lines_of(errors)
        text = "\n".join(lines)
        problem, fix = next(((p, f) for pattern, p, f in _FAILURES if re.search(pattern, text, re.I)), ("", ""))
        name, host = self.board.name, self.board.host
        if code == LINK_FAILED and problem:
            return BoardError(f"{name}: {problem.format(host=host)}", fix.format(host=host))
        last = brief(lines[-1]) if lines else f"exit code {code}"
        if code == LINK_FAILED:
            return BoardError(f"{name}: the link was cut ({last})", "Try again; --resume goes on where tune stopped")
        return BoardError(f"{name}: {last}")


def run(link: Link, script: str, *arguments: str, data: bytes = b"") -> None:
    """Run a script on the board, which has to succeed; `data` is its input.

    Raises:
        BoardError: it failed, or took too long.
    """
    done = finished(link.board, link.command(script, *arguments), COMMAND_S, data)
    if done.code != 0:
        raise link.failed(done.code, done.errors)


def finished(board: Board, command: Sequence[str], limit_s: float, data: bytes = b"") -> Done:
    """Run a command line of `Link.command` to its end.

    Raises:
        BoardError: it takes longer than `limit_s`, or writes too much.
    """
    try:
        done = run_bounded(command, limit_s, ANSWER_BYTES, data)
    except TimeoutError as error:
        raise hangs(board, limit_s) from error
    if done.out is None:
        raise too_much(board)
    return done


def too_much(board: Board) -> BoardError:
    """Return the error of a board that answers with more than is read."""
    return BoardError(f"{board.name} answers with more than {ANSWER_BYTES} bytes", "Look at what runs there")


def hangs(board: Board, limit_s: float) -> BoardError:
    """A board that does not answer."""
    return BoardError(
        f"{board.name} does not answer within {limit_s:.0f} s", "Look at the board; restart it if it hangs"
    )


_FAILURES = (
    (
        "identification has changed",
        "its host key is not the one that is known for {host}",
        "If the board was installed anew: ssh-keygen -R {host}. If not, something else answers in its place",
    ),
    (
        "host key verification failed",
        "its host key is not known yet",
        "Connect once with ssh {host} and compare the fingerprint",
    ),
    ("permission denied", "it refuses the login", "Set up a key: ssh-copy-id {host}. Passwords are never used"),
    ("could not resolve|name or service not known", "there is no host {host}", "Correct the name"),
    ("connection refused", "nothing listens for SSH there", "Start sshd on it, or correct the port"),
    ("timed? ?out|no route|unreachable", "it cannot be reached", "Is it switched on and on the network?"),
)
"""What ssh writes → what is wrong, what to do."""


def lines_of(errors: bytes) -> list[str]:
    """What a command wrote on stderr, without empty lines and without what could move a terminal's cursor."""
    return [printable(line.strip()) for line in errors.decode("utf-8", "replace").splitlines() if line.strip()]


def _ssh() -> str:
    found = which("ssh")
    if found is None:
        raise BoardError("boards are reached by ssh, which is not installed here", "Install OpenSSH's client")
    return found
