"""Processes whose output somebody else decides: how much of it is read and how long it may take is bounded."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import TypeVar

from edgeq_device.tail import Tail

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
