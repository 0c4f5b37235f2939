"""Processes that share work: opened by number or by the address of a Dask scheduler, and mapped over items."""

from __future__ import annotations

import logging
import re
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from edgeq.distributed.job import Job
from edgeq.distributed.versions import check_versions, versions
from edgeq.errors import DataError, RuntimeUnavailableError, UsageError

Given = TypeVar("Given")
Made = TypeVar("Made")

_ADDRESS = re.compile(r"(tcp|tls|ucx|ws|wss)://.+")
_MOST = 4096
_CONNECT_S = 10
# Results that may wait, for each thread, for one that was begun before them: memory does not grow with the items.
_WAITING = 4
_CONFIG = {
    # An item that this many workers died of is not tried again.
    "distributed.scheduler.allowed-failures": 1,
    # An item that is streamed carries its samples; how large it may be is decided where it is made.
    "distributed.admin.large-graph-warning-threshold": "1GiB",
}


class Workers:
    """Open workers; see `open_workers`. Argument: a client of Dask's."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def address(self) -> str:
        """Of the scheduler."""
        return str(self._client.scheduler.address)

    def everywhere(self, question: Callable[..., bool], *arguments: Any) -> bool:
        """Whether `question`, a function of a module, answers yes in every worker."""
        return all(self._client.run(question, *arguments).values())

    def map(self, job: Job[Given, Made], items: Iterable[Given]) -> Iterator[Made]:
        """`job` for each item, in their order. Items are taken as workers become free.

        A worker has one item for each of its threads, so that one that dies costs those again and nothing else.

        Raises:
            DataError: two workers died of the same item.
            RuntimeUnavailableError: the scheduler went away.
            EdgeqError: whatever the job raises.
        """
        from distributed import wait

        from edgeq.distributed.plugin import JobPlugin, run_item

        name = f"edgeq-{secrets.token_hex(8)}"
        threads = max(1, sum(self._client.nthreads().values()))
        try:
            self._client.register_plugin(JobPlugin(job, versions()), name=name)
        except ImportError as error:
            raise RuntimeUnavailableError(
                f"a worker cannot import {error.name}",
                "A task or function of your own must lie in a module that workers can import",
            ) from error
        pending: deque[_Pending] = deque()
        remaining = iter(items)
        upcoming = next(remaining, None)  # ready before a worker is free
        try:
            while pending or upcoming is not None:
                for one in pending:
                    one.fetch()
                running = [one.future for one in pending if not one.fetched]
                if upcoming is not None and len(running) < threads and len(pending) < _WAITING * threads:
                    pending.append(_Pending(upcoming, self._client.submit(run_item, name, upcoming, pure=False)))
                    upcoming = next(remaining, None)
                elif pending[0].fetched:
                    yield pending.popleft().result()
                else:
                    with _explained(pending[0].item), self._client.as_current():
                        wait(running, return_when="FIRST_COMPLETED")
        finally:
            self._client.cancel([one.future for one in pending])
            self._forget(name)

    def _forget(self, name: str) -> None:
        try:
            self._client.unregister_worker_plugin(name)
        except (KeyError, OSError):
            return  # a worker that has just started has nothing to forget, and neither has one that is gone


class _Pending:
    """An item on its way. Its result is fetched as soon as it is there, so that it does not go with its worker."""

    def __init__(self, item: object, future: Any) -> None:
        self.item, self.future = item, future
        self._results: list[Any] = []

    @property
    def fetched(self) -> bool:
        """Whether the result is here, or will never be."""
        return bool(self._results) or (self.future.done() and self.future.status != "finished")

    def fetch(self) -> None:
        """Fetch the result if it is there; an error waits for its turn."""
        if self.future.status == "finished" and not self._results:
            with _explained(self.item):
                self._results.append(self.future.result())

    def result(self) -> Any:
        """The result, or the error, of an item that is fetched."""
        with _explained(self.item):
            return self._results[0] if self._results else self.future.result()


@contextmanager
def _explained(item: object) -> Iterator[None]:
    """Dask's errors as edgeq's."""
    from asyncio import CancelledError

    from distributed import KilledWorker
    from distributed.comm import CommClosedError

    try:
        yield
    except KilledWorker as error:
        raise DataError(
            f"{item}: two workers ended while they ran them (memory, or a crash in a library)",
            "Look for the sample with --start and --count, or give the workers more memory",
        ) from error
    except (CancelledError, CommClosedError) as error:
        raise RuntimeUnavailableError("the Dask scheduler went away", "Start it again, and run this again") from error


@contextmanager
def open_workers(given: int | str | None) -> Iterator[Workers | None]:
    """Workers for the length of a `with` block: a number of processes of this machine, with one thread each, or the
    address of a Dask scheduler ("tcp://host:port"), which must be trusted. None gives None.

    Raises:
        UsageError: neither a number of 1 or more nor an address.
        RuntimeUnavailableError: Dask is not installed, no scheduler answers, or it has no workers.
    """
    if given is None:
        yield None
        return
    text = str(given)
    if not _ADDRESS.fullmatch(text) and not (text.isdecimal() and 1 <= int(text) <= _MOST):
        raise UsageError(
            f"--workers {text!r} is neither a number nor an address",
            "Give a number of processes, or the address of a Dask scheduler as tcp://host:8786",
        )
    try:
        import dask
        import distributed
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"--workers needs Dask, which cannot be imported ({error})", "Install it: pip install 'edgeq[distributed]'"
        ) from error
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(_CONFIG))
        try:
            address: Any = stack.enter_context(_local(int(text))) if text.isdecimal() else text
            client = stack.enter_context(distributed.Client(address, timeout=_CONNECT_S, set_as_default=False))
            client.wait_for_workers(1, timeout=_CONNECT_S)
        except (OSError, TimeoutError, ValueError) as error:
            raise RuntimeUnavailableError(
                f"no Dask workers at {text}: {' '.join(str(error).split())}", "Start the scheduler, and workers for it"
            ) from error
        try:
            client.run(check_versions, versions())
        except ImportError as error:
            raise RuntimeUnavailableError(
                f"a worker of {text} cannot import edgeq ({error})", "Install edgeq where the workers run"
            ) from error
        yield Workers(client)


@contextmanager
def _local(count: int) -> Iterator[Any]:
    """A cluster of this machine, on the loopback device, that keeps its files in a folder of its own."""
    from distributed import LocalCluster

    with (
        tempfile.TemporaryDirectory(prefix="edgeq-workers-", ignore_cleanup_errors=True) as folder,
        LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=True,
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
            memory_limit=None,  # the system's is the limit, as without workers
            local_directory=folder,
            silence_logs=logging.CRITICAL,
            preload=["edgeq.distributed.preload"],
        ) as cluster,
    ):
        yield cluster
