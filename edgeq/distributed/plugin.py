"""Set up each Dask worker when it starts, and keep a job open in it with a plugin."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from distributed import WorkerPlugin, get_worker


def dask_setup(worker: Any) -> None:
    """Ignore Ctrl-C in a worker, and import onnx_ir.

    A terminal sends Ctrl-C to all processes, but here the main process ends the workers. onnx_ir is the slowest import
    of all jobs, so the worker loads it while the main process prepares the first job.
    """
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import onnx_ir  # noqa: F401


class JobPlugin(WorkerPlugin):  # type: ignore[misc]  # Dask has no types
    """Open a job in a worker at its first item, and keep the job open.

    Args:
        open: the job's `open`; see `edgeq.distributed.workers.WorkerJob`.
        check: function that refuses a worker whose results would differ.
    """

    def __init__(self, open: Callable[[ExitStack], Callable[[Any], Any]], check: Callable[[], None]) -> None:
        self._open, self._check = open, check

    def setup(self, worker: Any) -> None:
        """Prepare the plugin after Dask has sent it to the worker."""
        self._stack, self._lock = ExitStack(), threading.Lock()
        self._run_job: Callable[[Any], Any] | None = None

    def teardown(self, worker: Any) -> None:
        """Close the job when the worker ends or no items are left."""
        self._stack.close()

    def run(self, item: Any) -> Any:
        """Run the job for one item and return its result."""
        with self._lock:  # several threads of a worker share one open job
            if self._run_job is None:
                self._check()
                self._run_job = self._open(self._stack)
        return self._run_job(item)


def run_item(name: str, item: Any) -> Any:
    """Run the job called `name` for `item` in a worker, and return its result."""
    return get_worker().plugins[name].run(item)
