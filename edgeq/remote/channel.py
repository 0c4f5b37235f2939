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
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import IO, Any

from edgeq_device.errors import DeviceError
from edgeq_device.plainjson import MAX_BYTES, parse_json
from edgeq_device.terminal import printable

from edgeq.errors import BoardError
from edgeq.ownership import sha256
from edgeq.remote.devices import Board
from edgeq.remote.link import LINK_FAILED, Link, hangs, run
from edgeq.resources import shipped

ANSWER_S = 120.0
"""A board that has not answered a request by then hangs. Hashing a gigabyte on a slow card takes a minute."""
_ALIVE_S, _EXIT_S = 15.0, 5.0
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

    def __init__(self, link: Link, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self.link = link
        self.sent = 0
        self._process = process
        self._errors = errors
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._writing = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._keep_alive, daemon=True).start()

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            BoardError: the link was cut, nothing came for `ANSWER_S`, or it is no answer.
        """
        try:
            line = self._lines.get(timeout=ANSWER_S)
        except Empty as error:
            raise hangs(self.link.board, ANSWER_S) from error
        if not line:
            raise self._cut()
        return read_json(line, self.link.board)

    def ask(self, request: Mapping[str, Any], data: IO[bytes] | None = None) -> dict[str, Any]:
        """The answer to a request, which the bytes of `data` follow.

        Raises:
            BoardError: as `answer`.
        """
        try:
            self._write(request, data)
        except OSError as error:
            raise self._cut() from error
        return self.answer()

    def end(self) -> None:
        """Let the board go; safe to call twice."""
        self._ended.set()
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_ALIVE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def errors(self) -> bytes:
        """What ssh and the program have written on stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def ends(self, within_s: float) -> bool:
        """Whether the program has ended, or does so in time."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def exit_code(self) -> int | None:
        """Of the program; None where it has not ended."""
        return self._process.poll()

    def _cut(self) -> BoardError:
        try:
            code = self._process.wait(_EXIT_S)  # ssh gives the exit code after the end of the output
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        # Killed by a signal: what held the link is gone. 0: the board's program took the link for cut.
        return self.link.failed(code if code > 0 else LINK_FAILED, self.errors())

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while line := stream.readline(MAX_BYTES + 2):
                self._lines.put(line)
        self._lines.put(b"")

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
        while not self._ended.wait(_ALIVE_S):
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
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the channel
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # neither a variable nor an entry in the list of users, as in containers
        user = str(os.getuid())
    who = f"{user}@{platform.node()}"
    command = link.command(_SERVE, link.board.folder, version, who, *link.board.python)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
    return Channel(link, process, errors)


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


def read_json(data: bytes, board: Board) -> dict[str, Any]:
    """JSON that a program on the board wrote: bounded, and no control characters are in its texts.

    Raises:
        BoardError: it is too large, too deep, or no JSON.
    """
    try:
        found: dict[str, Any] = without_controls(parse_json(data, f"the answer of {board.name}"))
    except DeviceError as error:
        raise BoardError(error.problem, "Is something printed at login there, such as by ~/.bashrc?") from error
    return found


def without_controls(value: Any) -> Any:
    """JSON from a board without what could move a terminal's cursor; system files keep their lines and tabs."""
    if isinstance(value, str):
        return "".join(part if part in "\n\t" else printable(part) for part in re.split(r"([\n\t])", value))
    if isinstance(value, dict):
        return {without_controls(key): without_controls(item) for key, item in value.items()}
    return [without_controls(item) for item in value] if isinstance(value, list) else value
