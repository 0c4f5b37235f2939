"""Set up each Dask worker at its start. A plugin keeps a job open in it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from distributed import WorkerPlugin, get_worker


def dask_setup(worker: Any) -> None:
    """Ignore Ctrl-C in a worker, and import onnx_ir.

    A terminal sends Ctrl-C to all processes, but the main process ends the workers. onnx_ir is the slowest import of
    all jobs, so the worker loads it while the main process prepares the first job.
    """
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import onnx_ir  # noqa: F401


class JobPlugin(WorkerPlugin):  # type: ignore[misc]  # Dask has no types
    """Keep a job open in a worker, from its first item on.

    Args:
        open: the job's `open`; see `edgeq.distributed.workers.Job`.
        check: function that refuses a worker whose results would differ.
    """

    def __init__(self, open: Callable[[ExitStack], Callable[[Any], Any]], check: Callable[[], None]) -> None:
        self._open, self._check = open, check

    def setup(self, worker: Any) -> None:
        """Prepare the plugin after Dask has sent it to the worker."""
        self._stack, self._lock = ExitStack(), threading.Lock()
        self._opened: Callable[[Any], Any] | None = None

    def teardown(self, worker: Any) -> None:
        """Close the job when the worker ends or there are no more items."""
        self._stack.close()

    def run(self, item: Any) -> Any:
        """Return the job's result for one item."""
        with self._lock:  # a worker with several threads opens the job once
            if self._opened is None:
                self._check()
                self._opened = self._open(self._stack)
        return self._opened(item)


def run_item(name: str, item: Any) -> Any:
    """Return the result of the job called `name` for `item`, in a worker."""
    return get_worker().plugins[name].run(item)
