"""The line to the program on a board that holds its lock: requests one way, answers the other, signs of life between.

The other side is targets/runtime/edgeq_board.py.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

from edgeq_device.errors import DeviceError
from edgeq_device.plainjson import parse_json
from edgeq_device.relay import Tail, printable

from edgeq.errors import BoardError
from edgeq.remote import link as bounds
from edgeq.remote.devices import Board
from edgeq.remote.link import LINK_FAILED, Link, hangs, run, start, stop, too_much, within
from edgeq.util.ownership import sha256
from edgeq.util.resources import shipped

_CHUNK = 1 << 20
_ABSENT, _NO_PYTHON = 94, 95
_PLACE = 'd=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/edgeq-device}; p="$d/board-$2.py"; umask 077; '
_SEND = _PLACE + 'mkdir -p "$d" && cat >"$p.new" && mv "$p.new" "$p"'
# $3: who; the rest: the interpreter. The private one of `edgeq device setup` comes first.
_SERVE = (
    f'{_PLACE}w=$3; shift 3; test -f "$p" || exit {_ABSENT}; '
    'test -x "$d/venv/bin/python" && set -- "$d/venv/bin/python"; '
    f'command -v "$1" >/dev/null || exit {_NO_PYTHON}; exec "$@" -I -B "$p" serve "$d" "$w"'
)


class Channel:
    """The running program; made by `open_channel`. `sent` counts the bytes that went there."""

    def __init__(self, link: Link, process: subprocess.Popen[bytes], errors: Tail) -> None:
        self.link = link
        self.sent = 0
        self._process = process
        self._errors = errors
        self._writing = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._keep_alive, daemon=True).start()

    def answer(self) -> dict[str, Any]:
        """Return what the program says first.

        Raises:
            BoardError: the link was cut, nothing came for `bounds.ANSWER_S`, or it is no answer.
        """
        return self._answered(bounds.ANSWER_S, self._read)

    def ask(self, request: Mapping[str, Any], data: IO[bytes] | None = None) -> dict[str, Any]:
        """Return the answer to a request, which the bytes of `data` follow.

        Raises:
            BoardError: as `answer`.
        """
        size = os.fstat(data.fileno()).st_size if data is not None else 0

        def asked() -> bytes:
            self._write(request, data)
            return self._read()

        return self._answered(bounds.ANSWER_S + size / bounds.LEAST_BYTES_PER_S, asked)

    def end(self) -> None:
        """Let the board go; safe to call twice."""
        self._ended.set()
        with suppress(TimeoutError, OSError, ValueError):
            within(bounds.ALIVE_S, self._let_go)
        stop(self._process)

    def errors(self) -> bytes:
        """Return the end of what ssh and the program have written on stderr."""
        return self._errors.read()

    def ends(self, within_s: float) -> bool:
        """Wait for the program to end; False where it does not in time."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def exit_code(self) -> int | None:
        """Of the program; None where it has not ended."""
        return self._process.poll()

    def _answered(self, limit_s: float, call: Callable[[], bytes]) -> dict[str, Any]:
        try:
            line = within(limit_s, call)
        except TimeoutError as error:
            stop(self._process)
            raise hangs(self.link.board, limit_s) from error
        except (OSError, ValueError) as error:  # the pipe is broken, or closed
            raise self._cut() from error
        except BaseException:  # the user ends it: nothing may wait for the board
            self._process.kill()
            raise
        if len(line) <= bounds.ANSWER_BYTES and not line.endswith(b"\n"):
            raise self._cut()
        try:
            if len(line) > bounds.ANSWER_BYTES:
                raise too_much(self.link.board)
            return read_json(line, self.link.board, kept="\n\t")  # of files of the system
        except BoardError:  # what writes this does not end by itself
            stop(self._process)
            raise

    def _let_go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _cut(self) -> BoardError:
        try:
            code = self._process.wait(bounds.EXIT_S)  # ssh gives the exit code after the end of the output
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        # Killed by a signal: what held the link is gone. 0: the board's program took the link for cut.
        return self.link.failed(code if code > 0 else LINK_FAILED, self.errors())

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline(bounds.ANSWER_BYTES + 1)

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
        while not self._ended.wait(bounds.ALIVE_S):
            try:
                self._write({"do": "alive"}, None)
            except (OSError, ValueError):  # the link is gone, which the next request reports
                return


@contextmanager
def open_channel(link: Link) -> Iterator[tuple[Channel, dict[str, Any]]]:
    """Start the board's program, which is sent where it is not there yet; gives what it says first.

    Raises:
        BoardError: the board cannot be reached, or has no Python.
    """
    board = link.board
    program = shipped("targets") / "runtime" / "edgeq_board.py"
    version = program_version()
    channel, sent = _start(link, version), 0
    try:
        hello = _hello(channel)
        if hello is None:
            channel.end()
            data = program.read_bytes()
            run(link, _SEND, board.folder, version, data=data)
            channel, sent = _start(link, version), len(data)
            hello = _hello(channel)
        if hello is None:
            raise BoardError(f"{board.name}: what was sent there does not stay", "Is its disk full, or read-only?")
        channel.sent = sent
        yield channel, hello
    finally:
        channel.end()


def program_version() -> str:
    """Of the board's program: by its content."""
    return sha256(shipped("targets") / "runtime" / "edgeq_board.py")[:16]


def _start(link: Link, version: str) -> Channel:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # neither a variable nor an entry in the list of users, as in containers
        user = str(os.getuid())
    who = f"{user}@{platform.node()}"
    command = link.command(_SERVE, link.board.folder, version, who, *link.board.python)
    return Channel(link, *start(command))


def _hello(channel: Channel) -> dict[str, Any] | None:
    """What the program says first; None where it is not there."""
    try:
        return channel.answer()
    except BoardError:
        code = channel.exit_code()
        if code == _NO_PYTHON:
            board = channel.link.board
            raise BoardError(
                f"{board.name} has no {board.python[0]}", "Install Python 3.9 or newer, or name it in devices.toml"
            ) from None
        if code != _ABSENT:
            raise
        return None


def read_json(data: bytes, board: Board, *, kept: str = "") -> dict[str, Any]:
    """Return JSON that a program on the board wrote: bounded, without control characters other than `kept` in texts.

    Raises:
        BoardError: it is too large, too deep, or no JSON.
    """
    try:
        found: dict[str, Any] = without_controls(
            parse_json(data, f"the answer of {board.name}", values=bounds.VALUES), kept=kept
        )
    except DeviceError as error:
        fix = "Is something printed at login there, such as by ~/.bashrc?"
        raise BoardError(bounds.brief(error.problem), fix) from error
    return found


def without_controls(value: Any, *, kept: str = "") -> Any:
    """Return JSON from a board without what could move a terminal's cursor, but for the characters `kept`."""
    if isinstance(value, str):
        return re.sub(f"[^{kept}]+", lambda part: printable(part[0]), value) if kept else printable(value)
    if isinstance(value, dict):
        return {without_controls(key, kept=kept): without_controls(item, kept=kept) for key, item in value.items()}
    return [without_controls(item, kept=kept) for item in value] if isinstance(value, list) else value
