"""The end of what a process writes on stderr."""

from __future__ import annotations

import os
import subprocess
import threading

TAIL_BYTES = 1 << 13
_PIECE = 1 << 16


class Tail:
    """Empties the stderr of `process` in a thread, so that the process never waits, and keeps the last bytes alone.

    The pipe is this object's from then on: `process.stderr` is None.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stderr is not None
        self._stream, process.stderr = process.stderr, None
        self._kept = b""
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def read(self, within_s: float = 1.0) -> bytes:
        """The last `TAIL_BYTES` so far; where the process has ended, all that it wrote is waited for."""
        self._thread.join(within_s)
        return self._kept

    def _drain(self) -> None:
        with self._stream:
            piece = b"-"
            while piece:
                piece = os.read(self._stream.fileno(), _PIECE)
                self._kept = (self._kept + piece)[-TAIL_BYTES:]
