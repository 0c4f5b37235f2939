"""Sessions that name no number of threads get one: another worker has the other core, and threads that wait for each
other keep it busy."""

from __future__ import annotations

import onnxruntime

_THREADS = onnxruntime.SessionOptions.intra_op_num_threads


class SessionOptions(onnxruntime.SessionOptions):
    """As onnxruntime's, where 0 threads are one."""

    def __init__(self) -> None:
        super().__init__()
        self.intra_op_num_threads = 0

    intra_op_num_threads = property(_THREADS.fget, lambda self, count: _THREADS.fset(self, count or 1))


def one_thread() -> None:
    """From here on in this process."""
    onnxruntime.SessionOptions = SessionOptions
