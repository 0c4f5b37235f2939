"""Give one thread to sessions that set no number of threads.

Another worker uses the other core, and threads that wait for each other would keep it busy.
"""

from __future__ import annotations

import onnxruntime

_THREADS = onnxruntime.SessionOptions.intra_op_num_threads


class SessionOptions(onnxruntime.SessionOptions):
    """Replace onnxruntime's options: 0 threads means one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.intra_op_num_threads = 0

    intra_op_num_threads = property(_THREADS.fget, lambda self, count: _THREADS.fset(self, count or 1))


def one_thread() -> None:
    """Use these options for all later sessions of this process."""
    onnxruntime.SessionOptions = SessionOptions
