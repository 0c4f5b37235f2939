"""Commands on a board through the system's ssh, with what people have configured for it: keys, agents, jump hosts and
known host keys. Its failures are one line each."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from edgeq_device.terminal import printable

from edgeq.emulate.commands import which
from edgeq.errors import BoardError
from edgeq.remote import bounds
from edgeq.remote.bounded import Done, run_bounded
from edgeq.remote.devices import Board

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
        last = bounds.brief(lines[-1]) if lines else f"exit code {code}"
        if code == LINK_FAILED:
            return BoardError(f"{name}: the link was cut ({last})", "Try again; --resume goes on where tune stopped")
        return BoardError(f"{name}: {last}")


def run(link: Link, script: str, *arguments: str, data: bytes = b"") -> None:
    """Run a script on the board, which has to succeed; `data` is its input.

    Raises:
        BoardError: it failed, or took too long.
    """
    done = finished(link.board, link.command(script, *arguments), bounds.COMMAND_S, data)
    if done.code != 0:
        raise link.failed(done.code, done.errors)


def finished(board: Board, command: Sequence[str], limit_s: float, data: bytes = b"") -> Done:
    """Run a command line of `Link.command` to its end.

    Raises:
        BoardError: it takes longer than `limit_s`, or writes too much.
    """
    try:
        done = run_bounded(command, limit_s, bounds.ANSWER_BYTES, data)
    except TimeoutError as error:
        raise hangs(board, limit_s) from error
    if done.out is None:
        raise too_much(board)
    return done


def too_much(board: Board) -> BoardError:
    """Return the error of a board that answers with more than is read."""
    return BoardError(f"{board.name} answers with more than {bounds.ANSWER_BYTES} bytes", "Look at what runs there")


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
