"""Run commands on a board through the system's ssh. ssh uses the user's own configuration: keys, agents, jump hosts and
known host keys. Each failure becomes a one-line error.

A board is not trusted. This module limits the size of the board's messages and the time that the board may take. Other
code reads a limit from this module each time the limit is needed (`link.ANSWER_S`), so each limit can be changed in one
place.

`Channel` is the connection to the program that holds the board's lock. Requests go one way and answers the other, with
keep-alive messages in between. The program on the board is targets/runtime/edgeq_board.py.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from edgeq_device.errors import DeviceError
from edgeq_device.system.plainjson import parse_json
from edgeq_device.system.programs import build_child_environment, find_program
from edgeq_device.system.relay import Tail, escape
from msgspec import Meta

from edgeq.errors import BoardError
from edgeq.remote.devices import Board
from edgeq.util.folders import shipped
from edgeq.util.marker import sha256

T = TypeVar("T")
_STOP_S = 1.0


def run_within(limit_s: float, call: Callable[[], T]) -> T:
    """Run `call` in a thread, because reading from a pipe or writing to it may block for ever, and return its result.

    Raises:
        TimeoutError: the call takes longer than `limit_s`. Its thread ends as soon as the process at the other end of
            the pipe ends.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future.result(limit_s)


def start(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Tail]:
    """Start a process. Return it together with a reader that keeps the end of its stderr."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=build_child_environment())
    return process, Tail(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End and reap a process, and close its pipes. The process gets SIGTERM first, so that ssh can end the processes
    through which it connects.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(TimeoutError, OSError):  # a reader is still waiting, or nobody will read the rest
            run_within(_STOP_S, stream.close)


@dataclass(frozen=True)
class EndedProcess:
    """Describe an ended process: its exit code, its standard output, and the end of its stderr."""

    code: int
    out: bytes
    errors: bytes


# Time limits in seconds.
ANSWER_S = 120.0
"""Limit for a request to the program that holds the board. Hashing a gigabyte on a slow memory card takes a minute."""
LEAST_BYTES_PER_S = 1 << 14
"""Slowest transfer to allow for. A request that carries a file gets extra time according to this rate."""
COMMAND_S = 60.0
"""Limit for sending edgeq's program to the board."""
REQUEST_S = 900.0
"""Limit for a request to the program that runs models. Opening a large model on a slow board takes minutes."""
VERIFY_S = 1800.0
"""Limit for the bundle's own runner."""
INSTALL_S = 3600.0
"""Limit for pip on the board."""
BENCH_S = 900.0
"""Limit for everything in a benchmark except its runs: opening, warming up, measuring memory."""
BENCH_FACTOR = 20.0
"""Limit for the runs of a benchmark, as a multiple of the minimum duration that its settings require."""
ALIVE_S = 15.0
"""Time between keep-alive messages to the board, and the board's limit for ending a session's programs."""
EXIT_S = 5.0
"""Limit for a process to end after its output has ended."""

# Limits in bytes and counts.
ANSWER_BYTES = 1 << 21
"""Maximum number of bytes in one answer, and in one command's standard output."""
VALUES = 1 << 17
"""Maximum number of values in one answer. The number is limited because parsed values take far more memory than their
text.
"""
ARRAYS = 1 << 12
"""Maximum number of arrays in one answer."""
SYSTEM_FILES = 1 << 11
KERNELS, KERNEL_VALUES = 1 << 17, 1 << 12
"""Maximum number of kernel events in a profile, and of values in each event."""
SHOWN = 300
"""Maximum number of characters to show of a message from the board."""
TABLE = 1 << 16
"""Maximum number of characters in a benchmark's tables."""

_ON_ONE_LINE = r"^[^\n\t]*$"
Line = Annotated[str, Meta(max_length=SHOWN, pattern=_ON_ONE_LINE, description="a short text on one line")]
Text = Annotated[str, Meta(max_length=1 << 12, pattern=_ON_ONE_LINE, description="a text on one line")]
SystemFile = Annotated[str, Meta(max_length=1 << 13, description="a small system file")]


def shorten(text: object) -> str:
    """Return a text from the board as one line, shortened if it is too long to read."""
    line = " ".join(str(text)[: 4 * SHOWN].split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"


CONNECT_S = 15
# Seconds between ssh's own keep-alive messages. After three of them without an answer, ssh gives up the link.
_ALIVE_S = 10
LINK_FAILED = 255
"""ssh's exit code if the link failed and not the command."""


class Link:
    """Describe how to reach one board.

    Args:
        sockets: folder for the socket through which all commands share one connection. Its path must be short.
    """

    def __init__(self, board: Board, sockets: Path) -> None:
        self.board = board
        program = find_program("ssh")
        if program is None:
            raise BoardError("ssh is not installed here, and edgeq needs it for boards", "Install OpenSSH's client")
        self._ssh = program
        sharing_options = ["-o", "ControlMaster=auto", "-o", f"ControlPath={sockets}/%C", "-o", "ControlPersist=no"]
        self._options = [
            *("-T", "-x", "-a"),
            *("-o", "BatchMode=yes"),
            *("-o", f"ConnectTimeout={CONNECT_S}"),
            *("-o", f"ServerAliveInterval={_ALIVE_S}"),
            *("-o", "ServerAliveCountMax=3"),
            # On Windows, ssh cannot share a connection through a socket.
            *(sharing_options if os.name == "posix" else ()),
            *(("-p", str(board.port)) if board.port else ()),
            *(("-l", board.user) if board.user else ()),
        ]

    def command(self, script: str, *arguments: str) -> list[str]:
        """Return the command line that runs a POSIX shell script on the board, whatever the user's login shell is."""
        words = ["exec", "sh", "-c", shlex.quote(script), "sh", *map(shlex.quote, arguments)]
        return [self._ssh, *self._options, "--", self.board.host, " ".join(words)]

    def explain_failure(self, code: int, errors: bytes) -> BoardError:
        """Return a one-line error for a failed command, made from its exit code and stderr."""
        lines = split_lines(errors)
        text = "\n".join(lines)
        problem, fix = next(((p, f) for pattern, p, f in _FAILURES if re.search(pattern, text, re.I)), ("", ""))
        name, host = self.board.name, self.board.host
        if code == LINK_FAILED and problem:
            return BoardError(f"{name}: {problem.format(host=host)}", fix.format(host=host))
        detail = shorten(lines[-1]) if lines else f"exit code {code}"
        if code == LINK_FAILED:
            return BoardError(
                f"{name}: the link was cut ({detail})", "Try again; ⟨resume=True⟩ continues where tune stopped"
            )
        return BoardError(f"{name}: {detail}")


def run(link: Link, script: str, *arguments: str, data: bytes = b"") -> None:
    """Run a script on the board and check that it succeeds. `data` is its standard input.

    Raises:
        BoardError: the script failed, or took too long.
    """
    ended = run_command(link.board, link.command(script, *arguments), COMMAND_S, data)
    if ended.code != 0:
        raise link.explain_failure(ended.code, ended.errors)


def run_command(board: Board, command: Sequence[str], limit_s: float, data: bytes = b"") -> EndedProcess:
    """Run a command line from `Link.command` until it ends.

    Raises:
        BoardError: the command takes longer than `limit_s`, or writes too much.
    """
    process, errors = start(command)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def talk() -> bytes:
        with suppress(BrokenPipeError), stdin:
            stdin.write(data)
        out = stdout.read(ANSWER_BYTES + 1)
        if len(out) > ANSWER_BYTES:
            raise large_answer_error(board)
        process.wait()
        return out

    try:
        out = run_within(limit_s, talk)
    except TimeoutError as error:
        raise timeout_error(board, limit_s) from error
    finally:
        stop(process)
    return EndedProcess(process.returncode, out, errors.read_last())


def large_answer_error(board: Board) -> BoardError:
    """Return the error for a board whose answer exceeds the limit."""
    return BoardError(f"{board.name} sends an answer of more than {ANSWER_BYTES} bytes", "Check what runs there")


def timeout_error(board: Board, limit_s: float) -> BoardError:
    """Return the error for a board that does not answer."""
    return BoardError(f"{board.name} does not answer within {limit_s:.0f} s", "Check the board; restart it if it hangs")


_FAILURES = (
    (
        "identification has changed",
        "its host key differs from the known one for {host}",
        "If the board was reinstalled: ssh-keygen -R {host}. If not, another machine may be answering",
    ),
    (
        "host key verification failed",
        "its host key is not known yet",
        "Connect once with ssh {host} and compare the fingerprint",
    ),
    ("permission denied", "it refuses the login", "Set up a key: ssh-copy-id {host}. Passwords are never used"),
    ("could not resolve|name or service not known", "there is no host {host}", "Correct the name"),
    ("connection refused", "no SSH server listens there", "Start sshd on it, or correct the port"),
    ("timed? ?out|no route|unreachable", "it cannot be reached", "Check that it is switched on and on the network"),
)
"""Patterns in ssh's messages, each with the problem and its solution."""


def split_lines(errors: bytes) -> list[str]:
    """Return the lines of a command's stderr. Empty lines are left out, and so are characters that could move a
    terminal's cursor.
    """
    return [escape(line.strip()) for line in errors.decode("utf-8", "replace").splitlines() if line.strip()]


_CHUNK = 1 << 20
_EXPOSED, _ABSENT, _NO_PYTHON = 93, 94, 95
_PLACE = 'd=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/edgeq-device}; p="$d/board-$2.py"; umask 077; '
_SEND = _PLACE + 'mkdir -p "$d" && cat >"$p.new" && mv "$p.new" "$p"'
# Nothing in the folder may run if another user of the board could have put it there. `find` prints such places; in a
# sticky folder, such as /tmp, others cannot rename the user's files.
_CHECK = (
    'o=$(find "$d/.." "$d/." "$p" "$d/venv/." "$d/venv/bin/." -prune '
    r'\( ! -user "$(id -u)" ! -user 0 -o -perm -002 ! -perm -1000 \) -print; '
    'find "$d/." "$p" "$d/venv/." "$d/venv/bin/." -prune -perm -020 -print) 2>/dev/null; '
    f'test -z "$o" || exit {_EXPOSED}; '
)
# $3 is the user, and the interpreter follows. The private Python from `edgeq device setup` takes precedence.
_SERVE = (
    f'{_PLACE}{_CHECK}w=$3; shift 3; test -f "$p" || exit {_ABSENT}; '
    'test -x "$d/venv/bin/python" && set -- "$d/venv/bin/python"; '
    f'command -v "$1" >/dev/null || exit {_NO_PYTHON}; exec "$@" -I -B "$p" serve "$d" "$w"'
)


class Channel:
    """Exchange messages with the program that runs on a board. `open_channel` makes this object.

    Attributes:
        sent: number of bytes sent to the board.
    """

    def __init__(self, link: Link, process: subprocess.Popen[bytes], errors: Tail) -> None:
        self.link = link
        self.sent = 0
        self._process = process
        self._errors = errors
        self._writing = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._keep_alive, daemon=True).start()

    def answer(self) -> dict[str, Any]:
        """Return the first message of the program.

        Raises:
            BoardError: the link was cut, no message came within `ANSWER_S`, or the message is not a valid answer.
        """
        return self._receive_answer(ANSWER_S, self._read_line)

    def ask(self, request: Mapping[str, Any], data: IO[bytes] | None = None) -> dict[str, Any]:
        """Send a request, followed by the bytes of `data`, and return the answer.

        Raises:
            BoardError: see `answer`.
        """
        size = os.fstat(data.fileno()).st_size if data is not None else 0

        def exchange() -> bytes:
            self._write(request, data)
            return self._read_line()

        return self._receive_answer(ANSWER_S + size / LEAST_BYTES_PER_S, exchange)

    def end(self) -> None:
        """Release the board. It is safe to call this a second time."""
        self._ended.set()
        assert self._process.stdin is not None
        with suppress(TimeoutError, subprocess.TimeoutExpired, OSError, ValueError):
            run_within(ALIVE_S, self._process.stdin.close)
            self._process.wait(ALIVE_S)
        stop(self._process)

    def errors(self) -> bytes:
        """Return the end of the stderr, which contains the errors of ssh and of the program."""
        return self._errors.read_last()

    def ends(self, within_s: float) -> bool:
        """Wait until the program and everything in its session have ended. Return False if this takes longer than
        `within_s`.
        """
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def exit_code(self) -> int | None:
        """Return the exit code of the program, or None while it runs."""
        return self._process.poll()

    def _receive_answer(self, limit_s: float, call: Callable[[], bytes]) -> dict[str, Any]:
        try:
            line = run_within(limit_s, call)
        except TimeoutError as error:
            stop(self._process)
            raise timeout_error(self.link.board, limit_s) from error
        except (OSError, ValueError) as error:  # the pipe was broken or closed
            raise self._link_error() from error
        except BaseException:  # the user interrupted the program, so do not wait for the board
            self._process.kill()
            raise
        if len(line) <= ANSWER_BYTES and not line.endswith(b"\n"):
            raise self._link_error()
        try:
            if len(line) > ANSWER_BYTES:
                raise large_answer_error(self.link.board)
            # Answers contain system files, which have line breaks and tabs.
            return read_json(line, self.link.board, allowed="\n\t")
        except BoardError:  # a program that writes such an answer does not end by itself
            stop(self._process)
            raise

    def _link_error(self) -> BoardError:
        try:
            code = self._process.wait(EXIT_S)  # ssh exits shortly after its output ends
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        # A negative code means that a signal killed ssh, so the link is gone. Code 0 means that the board's program
        # ended because it treated the link as cut.
        return self.link.explain_failure(code if code > 0 else LINK_FAILED, self.errors())

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline(ANSWER_BYTES + 1)

    def _write(self, request: Mapping[str, Any], data: IO[bytes] | None) -> None:
        assert self._process.stdin is not None
        line = json.dumps(request).encode() + b"\n"
        with self._writing:
            self._process.stdin.write(line)
            self.sent += len(line)
            while data is not None and (piece := data.read(_CHUNK)):
                self._process.stdin.write(piece)
                self.sent += len(piece)
            self._process.stdin.flush()

    def _keep_alive(self) -> None:
        while not self._ended.wait(ALIVE_S):
            try:
                self._write({"do": "alive"}, None)
            except (OSError, ValueError):  # the link is gone; the next request reports it
                return


@contextmanager
def open_channel(link: Link) -> Iterator[tuple[Channel, dict[str, Any]]]:
    """Start the program on the board, and yield the channel and the program's first message. If the board lacks the
    program, send it first.

    Raises:
        BoardError: the board cannot be reached, or has no Python.
    """
    board = link.board
    version = program_version()
    channel, sent = _start(link, version), 0
    try:
        hello = _read_hello(channel)
        if hello is None:
            channel.end()
            data = PROGRAM.read_bytes()
            run(link, _SEND, board.folder, version, data=data)
            channel, sent = _start(link, version), len(data)
            hello = _read_hello(channel)
        if hello is None:
            raise BoardError(
                f"{board.name}: a file that was sent there disappeared", "Check whether its disk is full or read-only"
            )
        channel.sent = sent
        yield channel, hello
    finally:
        channel.end()


PROGRAM = shipped("targets") / "runtime" / "edgeq_board.py"


def program_version() -> str:
    """Return the version of the board's program, which is a hash of its content."""
    return sha256(PROGRAM)[:16]


def _start(link: Link, version: str) -> Channel:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may lack both the variables and the list entry that name the user
        user = str(os.getuid())
    who = f"{user}@{platform.node()}"
    command = link.command(_SERVE, link.board.folder, version, who, *link.board.python)
    return Channel(link, *start(command))


def _read_hello(channel: Channel) -> dict[str, Any] | None:
    """Return the first message of the program, or None if the board does not have the program."""
    try:
        return channel.answer()
    except BoardError:
        code = channel.exit_code()
        if code == _NO_PYTHON:
            board = channel.link.board
            raise BoardError(
                f"{board.name} has no {board.python[0]}", "Install Python 3.9 or newer, or name it in devices.toml"
            ) from None
        if code == _EXPOSED:
            board = channel.link.board
            place = board.folder or "edgeq-device in the user's cache"
            raise BoardError(
                f"{board.name}: other users can write to {place} there",
                "Remove it, and name a folder that only you can write in devices.toml",
            ) from None
        if code != _ABSENT:
            raise
        return None


def read_json(data: bytes, board: Board, *, allowed: str = "") -> dict[str, Any]:
    """Parse JSON from a program on the board, within size and depth limits. Control characters are removed from its
    texts, except those in `allowed`.

    Raises:
        BoardError: the data are too large, too deep, or not JSON.
    """
    try:
        content = parse_json(data, f"the answer of {board.name}", values=VALUES)
    except DeviceError as error:
        fix = "Check whether something prints text at login there, such as ~/.bashrc"
        raise BoardError(shorten(error.problem), fix) from error
    return {
        strip_controls(key, allowed=allowed): strip_controls(item, allowed=allowed) for key, item in content.items()
    }


def strip_controls(value: Any, *, allowed: str = "") -> Any:
    """Return JSON from a board without characters that could move a terminal's cursor. Characters in `allowed` stay."""
    if isinstance(value, str):
        return re.sub(f"[^{allowed}]+", lambda part: escape(part[0]), value) if allowed else escape(value)
    if isinstance(value, dict):
        return {
            strip_controls(key, allowed=allowed): strip_controls(item, allowed=allowed) for key, item in value.items()
        }
    return [strip_controls(item, allowed=allowed) for item in value] if isinstance(value, list) else value
