"""A worker's side of a job: the only module that needs Dask to be imported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from distributed import WorkerPlugin, get_worker


class JobPlugin(WorkerPlugin):  # type: ignore[misc]  # Dask has no types
    """Keeps a job open in a worker, from its first item on.

    Args:
        check: refuses a worker that lacks what the job needs.
    """

    def __init__(self, job: Any, check: Callable[[], None]) -> None:
        self._job, self._check = job, check

    def setup(self, worker: Any) -> None:
        """Called by Dask in the worker, when it has got the plugin."""
        self._stack, self._lock = ExitStack(), threading.Lock()
        self._opened: Callable[[Any], Any] | None = None

    def teardown(self, worker: Any) -> None:
        """Called by Dask in the worker, when it ends or no more items come."""
        self._stack.close()

    def run(self, item: Any) -> Any:
        """The job's result for one item."""
        with self._lock:  # a worker with several threads opens it once
            if self._opened is None:
                self._check()
                self._opened = self._job.open(self._stack)
        return self._opened(item)


def run_item(name: str, item: Any) -> Any:
    """The result of the job called `name` for `item`, in a worker."""
    return get_worker().plugins[name].run(item)
