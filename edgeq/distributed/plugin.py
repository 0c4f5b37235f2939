"""A job in a worker: Dask gives the plugin to every worker, those that it starts later included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from distributed import WorkerPlugin, get_worker

from edgeq.distributed.job import Job
from edgeq.distributed.versions import check_versions


class JobPlugin(WorkerPlugin):  # type: ignore[misc]  # Dask has no types
    """Keeps a job open in a worker, from its first item on.

    Args:
        expected: versions that the worker must have.
    """

    def __init__(self, job: Job[Any, Any], expected: Mapping[str, str]) -> None:
        self._job, self._expected = job, dict(expected)

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
                check_versions(self._expected)
                self._opened = self._job.open(self._stack)
        return self._opened(item)


def run_item(name: str, item: Any) -> Any:
    """The result of the job called `name` for `item`, in a worker."""
    return get_worker().plugins[name].run(item)
