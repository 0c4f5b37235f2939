"""Set up each Dask worker at its start, and keep a job open in it with a plugin."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from distributed import WorkerPlugin, get_worker


def dask_setup(worker: Any) -> None:
    """Leave Ctrl-C, which a terminal sends to all processes, to the one that ends the workers; and import what takes
    longest of all that jobs import, while the main process still prepares the first one."""
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import onnx_ir  # noqa: F401


class JobPlugin(WorkerPlugin):  # type: ignore[misc]  # Dask has no types
    """Keep a job open in a worker, from its first item on.

    Args:
        open: of the job; see `edgeq.distributed.workers.Job`.
        check: refuses a worker whose results would differ.
    """

    def __init__(self, open: Callable[[ExitStack], Callable[[Any], Any]], check: Callable[[], None]) -> None:
        self._open, self._check = open, check

    def setup(self, worker: Any) -> None:
        """Make ready when Dask has brought the plugin to the worker."""
        self._stack, self._lock = ExitStack(), threading.Lock()
        self._opened: Callable[[Any], Any] | None = None

    def teardown(self, worker: Any) -> None:
        """Close the job when the worker ends or no more items come."""
        self._stack.close()

    def run(self, item: Any) -> Any:
        """Return the job's result for one item."""
        with self._lock:  # a worker with several threads opens it once
            if self._opened is None:
                self._check()
                self._opened = self._open(self._stack)
        return self._opened(item)


def run_item(name: str, item: Any) -> Any:
    """Return the result of the job called `name` for `item`, in a worker."""
    return get_worker().plugins[name].run(item)
