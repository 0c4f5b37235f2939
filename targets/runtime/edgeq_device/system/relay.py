"""Relay the output of libraries to standard error, and pass each line through `escape`.

onnxruntime logs names from a file unchanged, and C code writes them to descriptors 1 and 2. In the child process, which
does the work, both descriptors are a pipe. The parent process reads that pipe. Python's own streams keep the caller's
descriptors.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import unicodedata
from contextlib import suppress
from typing import Any, Tuple

# Enough for the last lines of an error.
TAIL_BYTES = 1 << 13


class Tail:
    """Read the stderr of `process` in a thread, so that the process never blocks, and keep only the last bytes.

    From then on the pipe belongs to this object, and `process.stderr` is None.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stderr is not None
        self._stream, process.stderr = process.stderr, None
        self._bytes = b""
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def read_last(self, within_s: float = 1.0) -> bytes:
        """Return the last `TAIL_BYTES` that have arrived. Wait up to `within_s` seconds for the process to end and its
        output to be complete.
        """
        self._thread.join(within_s)
        return self._bytes

    def _drain(self) -> None:
        with self._stream:
            piece = b"-"
            while piece:
                piece = os.read(self._stream.fileno(), _PIECE)
                self._bytes = (self._bytes + piece)[-TAIL_BYTES:]


# Match USER:PASSWORD@HOST, or TOKEN@HOST after http(s). A path keeps only one slash. "@sha256:" begins a digest.
_PASSWORD = re.compile(r"(https?:/{1,2}|:)[^\s/\\'\"]{1,256}@(?!sha256:)", re.IGNORECASE)


def escape(text: str) -> str:
    r"""Return `text` with an escape (`\n`, `\x1b`, `\u202e`) in place of each line break, control character,
    bidirectional-text mark, lone surrogate and other invisible character.
    """
    if text.isprintable():
        return text
    visible = (c.isprintable() or unicodedata.category(c) == "Zs" for c in text)
    return "".join(
        c if is_visible else c.encode("unicode_escape").decode("ascii") for c, is_visible in zip(text, visible)
    )


def escape_lines(text: str) -> str:
    """Escape `text` as `escape` does, but keep line breaks, tabs and carriage returns."""
    if text.isprintable():
        return text
    return "".join(part if part in "\n\t\r" else escape(part) for part in re.split(r"([\n\t\r])", text))


def hide_passwords(text: str) -> str:
    """Return `text` with "…" in place of each password in an address: "tcp://user:…@host", "https://…@host"."""
    return _PASSWORD.sub(r"\1…@", text)


def format_json(record: Any) -> str:
    """Return JSON for standard output, in ASCII only."""
    return json.dumps(record, indent=2, allow_nan=False).replace("\x7f", "\\u007f")


def prepare_output() -> None:
    """Prepare the standard streams.

    A stream that the caller has closed is opened to the null device, so that no file opened later gets its number.
    Characters that the encoding of standard output lacks are written as escapes, as on stderr. Such characters occur
    because a file name need not be text.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115  # they live as long as the program
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


MARK = "| "
"""Start of each relayed line, so that a name with a line break cannot look like a line of the program itself."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The capacity of a pipe on Linux.
_PIECE = 1 << 16
# A process that outlives the child may write for ever, so only this much is read after the end.
_LAST_PIECES = 16


class Outlet(io.TextIOWrapper):
    """Escape control sequences on a standard stream, to which Python libraries also print names and warnings."""

    def write(self, text: str) -> int:
        """Write `text` through `escape_lines`."""
        super().write(escape_lines(text))
        return len(text)


class _Unfiltered:
    """Write to the stream under an `Outlet` without escapes."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._outlet, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outlet, name)


def bypass_filter(stream: Any) -> Any:
    """Return `stream` without the filter, for code that draws with its own escape sequences and makes its texts
    printable itself.
    """
    return _Unfiltered(stream) if isinstance(stream, Outlet) else stream


def open_pipe() -> Tuple[int, int]:
    """Return the ends of a pipe. Neither end gets the number of a standard stream that the caller has closed."""
    while True:
        filler = os.open(os.devnull, os.O_RDWR)
        if filler > 2:
            os.close(filler)
            return os.pipe()


def divert(reader: int, writer: int) -> None:
    """Point descriptors 1 and 2 of this process at the pipe. sys.stdout and sys.stderr still write to their former
    targets.
    """
    os.close(reader)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        stream.flush()
        if isinstance(stream, io.TextIOWrapper):
            unbuffered = getattr(stream, "write_through", False)
            target: Any = os.fdopen(os.dup(stream.fileno()), "wb", 0 if unbuffered else -1)
            outlet = Outlet(
                target, stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=unbuffered
            )
            setattr(sys, name, outlet)
        os.dup2(writer, number)
    os.close(writer)


def relay(child: int, reader: int, writer: int) -> int:
    """Relay output from the pipe until `child` has ended. Return its status in the form of `os.waitpid`.

    Call this while SIGCHLD is blocked; it unblocks the signal. A process that outlives the child may keep the pipe
    open. This function does not wait for the output of such a process.
    """
    os.close(writer)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(reader, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    # A child that ends just before `select` would be missed without it.
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    pending, more = b"", True

    def take() -> None:
        """Read once, and write all lines that are complete or are too long to wait for their end."""
        nonlocal pending, more
        piece = os.read(reader, _PIECE)
        more = bool(piece)
        pending += piece
        complete, line_break, partial = pending.rpartition(b"\n")
        if line_break or len(partial) > _PIECE:
            pending = partial if line_break else b""
            _write(complete if line_break else partial)

    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended:
        ready, _, _ = select.select([woken, *[reader] * more], [], [])
        if woken in ready:
            os.read(woken, _PIECE)
            ended, status = os.waitpid(child, os.WNOHANG)
        if reader in ready:
            take()
    for _ in range(_LAST_PIECES):
        if not (more and select.select([reader], [], [], 0)[0]):
            break
        take()
    if pending:  # text after the last line break
        _write(pending)
    return status


def _write(data: bytes) -> None:
    text = _COLOUR.sub("", data.decode("utf-8", "backslashreplace"))
    # Ignore a line that has only spaces: a library printed them only to colour its last line.
    lines = "".join(f"{MARK}{escape(line)}\n" for line in text.split("\n") if line.strip())
    # Ignore errors: if nobody reads stderr any more, the process that works must not wait for a reader.
    with suppress(OSError):
        sys.stderr.write(lines)
        sys.stderr.flush()
