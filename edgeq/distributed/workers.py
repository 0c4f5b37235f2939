"""Share work among processes: opened by number or by the address of a Dask scheduler, and mapped over items."""

from __future__ import annotations

import hashlib
import importlib
import logging
import multiprocessing
import os
import re
import secrets
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from edgeq import __version__
from edgeq.errors import DataError, RuntimeUnavailableError, UsageError

# multiprocessing starts Python with -c, which without the first one looks in the working directory for the modules of
# multiprocessing itself. Dask's own choice also has glibc return every image's memory to the system at once: 12 times
# the page faults, a fifth of the time.
_ENVIRONMENT = dict.fromkeys(("PYTHONSAFEPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# multiprocessing's own choice on Linux from Python 3.14 on: what takes long to import is imported once for all workers,
# next to what this process does meanwhile. Elsewhere libraries of the system do not survive a fork.
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
_SHARED = ("distributed", "onnx_ir", "onnxruntime", "PIL.Image")


@contextmanager
def starting(modules: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Set Dask's options for worker processes and, for the length of a `with` block, the environment that they start
    with; begin to start the process that they are forked from, where there is one.

    Args:
        modules: what is imported there once for all workers.
    """
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        if _METHOD == "forkserver":
            from multiprocessing import forkserver

            multiprocessing.get_context(_METHOD).set_forkserver_preload([*_SHARED, *modules])
            forkserver.ensure_running()
        yield {
            "distributed.worker.multiprocessing-method": _METHOD,
            "distributed.nanny.pre-spawn-environ": _ENVIRONMENT,
        }
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _local_cluster(count: int, stack: ExitStack) -> Any:
    """Return a cluster of this machine, on the loopback device, that keeps its files in a folder of its own.

    Who reaches it can run code, and every user of the machine reaches the loopback device: TLS with a key that these
    processes alone have keeps others out.
    """
    from distributed import LocalCluster

    folder = tempfile.TemporaryDirectory(prefix="edgeq-workers-", ignore_cleanup_errors=True)
    cluster = LocalCluster(
        n_workers=count,
        threads_per_worker=1,
        processes=True,
        dashboard_address="127.0.0.1:0",
        scheduler_kwargs={"dashboard": False},
        memory_limit=None,  # the system's is the limit, as without workers
        local_directory=stack.enter_context(folder),
        silence_logs=logging.CRITICAL,
        security=True,
        preload=["edgeq.distributed.plugin"],
    )
    return stack.enter_context(cluster)


Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Job(Protocol[Item, Result]):
    """Define what workers do. It travels to each of them by pickle, once."""

    def open(self, stack: ExitStack) -> Callable[[Item], Result]:
        """Make ready, in a worker; what is to be closed when it ends goes onto `stack`."""
        ...


def versions() -> dict[str, str]:
    """Return the versions of edgeq, numpy and onnxruntime in this process; "none" for what is not installed."""
    found = {"edgeq": __version__}
    for name in ("numpy", "onnxruntime"):
        try:
            found[name] = str(importlib.import_module(name).__version__)
        except ImportError:
            found[name] = "none"
    return found


def check_versions(expected: Mapping[str, str]) -> None:
    """Refuse to work in a process whose versions are others: its results would be.

    Raises:
        RuntimeUnavailableError: names the first one.
    """
    for name, here in versions().items():
        if here != expected.get(name):
            raise RuntimeUnavailableError(
                f"a worker has {name} {here}, and this process has {expected.get(name)}",
                "Install the same versions everywhere",
            )


_ADDRESS = re.compile(r"(tcp|tls|ucx|ws|wss)://[^@]+")
_MOST = 4096
_CONNECT_S = 10
# Results that may wait, for each thread, for one that was begun before them: memory does not grow with the items.
_WAITING = 4
# Seconds from one look at who is there to the next; for a worker that died to be replaced; for a result to arrive.
_LOOK_S, _RESTART_S, _FETCH_S = 0.5, 120.0, 60.0
# An item that this many workers died of is not tried again.
_MOST_DEATHS = 2
_CONFIG = {
    # An item that is streamed carries its samples; how large it may be is decided where it is made.
    "distributed.admin.large-graph-warning-threshold": "1GiB",
}


class Workers:
    """Open workers; see `open_workers`. Argument: gives a client of Dask's, when it is needed first."""

    def __init__(self, client: Callable[[], Any]) -> None:
        self._start = client

    @cached_property
    def _client(self) -> Any:
        return self._start()

    @property
    def address(self) -> str:
        """Return the address of the scheduler."""
        return str(self._client.scheduler.address)

    def everywhere(self, question: Callable[..., bool], *arguments: Any) -> bool:
        """Return whether `question`, a function of a module, answers yes in every worker."""
        return all(self._client.run(question, *arguments).values())

    def map(self, job: Job[Item, Result], items: Iterable[Item]) -> Iterator[Result]:
        """Run `job` for each item, in their order. Workers take items as they become free.

        A worker has one item for each of its threads, and gets the next when the result of the last is here, so that
        one that dies costs those again and nothing else.

        Raises:
            DataError: two workers died of the same item.
            RuntimeUnavailableError: the scheduler went away.
            EdgeqError: whatever the job raises.
        """
        from edgeq.distributed.plugin import JobPlugin, run_item

        name = f"edgeq-{secrets.token_hex(8)}"
        try:
            self._client.register_plugin(JobPlugin(job.open, partial(check_versions, versions())), name=name)
        except ImportError as error:
            raise RuntimeUnavailableError(
                f"a worker cannot import {error.name}",
                "A task or function of your own must lie in a module that workers can import",
            ) from error
        crew = _Crew(self._client)
        most = _WAITING * max(1, len(crew.free))
        pending: deque[_Pending] = deque()
        remaining = iter(items)
        upcoming = next(remaining, None)  # ready before a worker is free
        try:
            while pending or upcoming is not None:
                for one in pending:
                    if one.fetch():
                        crew.release(one.worker)
                gone = crew.gone()
                for one in pending:
                    one.lose(gone)
                idle = next((one for one in pending if not one.worker), None)
                if crew.free and idle is not None:
                    worker = crew.free.popleft()
                    idle.worker = worker
                    idle.future = self._client.submit(run_item, name, idle.item, pure=False, workers=worker)
                elif crew.free and upcoming is not None and len(pending) < most:
                    pending.append(_Pending(upcoming))
                    upcoming = next(remaining, None)
                elif pending and pending[0].fetched:
                    yield pending.popleft().result()
                else:
                    with _explained(), self._client.as_current():
                        crew.wait([one.future for one in pending if one.worker and not one.fetched])
        finally:
            self._client.cancel([one.future for one in pending if one.worker and not one.fetched])
            self._forget(name)

    def _forget(self, name: str) -> None:
        # A worker that has just started has nothing to forget, and neither has one that is gone.
        with suppress(KeyError, OSError):
            self._client.unregister_worker_plugin(name)


class _Crew:
    """The workers that are there. Each item is assigned to one by name: Dask by itself would also give an item to one
    whose last result nobody has fetched, and put the item of one that has died behind another.

    Attributes:
        free: addresses of workers, once for each thread that has nothing to do.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._known: set[str] = set()
        self.free: deque[str] = deque()
        self._look = 0.0
        self.gone()

    def gone(self) -> set[str]:
        """Return the workers that have ended since the last look, which happens now and then; new ones are free from
        now on.
        """
        if time.monotonic() < self._look:
            return set()
        there = self._client.nthreads()
        self._look = time.monotonic() + _LOOK_S
        gone, new = self._known - set(there), set(there) - self._known
        self._known = set(there)
        self.free = deque(address for address in self.free if address not in gone)
        self.free += [address for address in there if address in new for _ in range(there[address])]
        return gone

    def release(self, worker: str) -> None:
        """A thread of a worker has nothing to do any more."""
        if worker in self._known:
            self.free.append(worker)

    def wait(self, futures: Sequence[Any]) -> None:
        """Until one is done, or a worker may have come or gone."""
        from distributed import wait

        try:
            if futures:
                wait(futures, timeout=_LOOK_S, return_when="FIRST_COMPLETED")
            else:
                self._client.wait_for_workers(1, timeout=_RESTART_S)
        except TimeoutError as error:
            if not futures:
                raise RuntimeUnavailableError("all workers ended", "Look at their memory") from error


class _Pending:
    """An item on its way. Its result is fetched as soon as it is there, so that it does not go with its worker.

    Attributes:
        worker: address of the one that has it, or has done it; "": none.
        fetched: whether the result is here, or will never be.
    """

    def __init__(self, item: object) -> None:
        self.item, self.worker = item, ""
        self.future: Any = None
        self.fetched = False
        self._deaths = 0
        self._results: list[Any] = []

    def fetch(self) -> bool:
        """Fetch the result if it is there; an error waits for its turn. Whether the worker has become free by it."""
        if self.fetched or not self.worker or not self.future.done():
            return False
        if self.future.status == "finished":
            with _explained():
                try:
                    self._results.append(self.future.result(timeout=_FETCH_S))
                except TimeoutError:  # its worker has died meanwhile
                    return False
            self.future.release()  # or it would be done again when its worker dies
        self.fetched = True
        return True

    def lose(self, gone: Collection[str]) -> None:
        """Give it to another worker if its own is gone.

        Raises:
            DataError: it was the second one.
        """
        if self.fetched or self.worker not in gone:
            return
        self.worker = ""
        self.future.release()
        self._deaths += 1
        if self._deaths == _MOST_DEATHS:
            raise DataError(
                f"{self.item}: two workers ended while they ran them (memory, or a crash in a library)",
                "Look for the sample with --start and --count, or give the workers more memory",
            )

    def result(self) -> Any:
        """Return the result, or the error, of an item that is fetched."""
        with _explained():
            return self._results[0] if self._results else self.future.result()


@contextmanager
def _explained() -> Iterator[None]:
    """Dask's errors as edgeq's."""
    from asyncio import CancelledError

    from distributed.comm import CommClosedError

    try:
        yield
    except (CancelledError, CommClosedError) as error:
        raise RuntimeUnavailableError("the Dask scheduler went away", "Start it again, and run this again") from error


def check_workers(given: str) -> None:
    """Raise UsageError unless `given` is a number of processes, or an address, that `open_workers` takes."""
    if not _ADDRESS.fullmatch(given) and not (given.isdecimal() and 1 <= int(given) <= _MOST):
        raise UsageError(
            f"{given!r} is neither a number of workers, from 1 to {_MOST}, nor an address",
            "Give a number of processes, or the address of a Dask scheduler as tcp://host:8786",
        )


@contextmanager
def open_workers(given: int | str | Workers | None, modules: Sequence[str] = ()) -> Iterator[Workers | None]:
    """Open workers for the length of a `with` block: a number of processes of this machine, with one thread each, or
    the address of a Dask scheduler ("tcp://host:port"), which must be trusted. None and workers that are already open
    are yielded unchanged.

    Processes of this machine start next to what the block does first; errors of theirs come with their first use.

    Args:
        modules: what jobs need; processes of this machine import it while they start.

    Raises:
        UsageError: neither a number of 1 or more nor an address.
        RuntimeUnavailableError: Dask is not installed, no scheduler answers, or it has no workers.
    """
    if given is None or isinstance(given, Workers):
        yield given
        return
    text = str(given)
    check_workers(text)
    # A process that multiprocessing has started still imports the script that started it: what is not under
    # `if __name__ == "__main__":` there runs again. The process that started this one has the error that says why.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        settings = stack.enter_context(starting(modules)) if text.isdecimal() else {}
        try:
            import cryptography  # noqa: F401  # for Dask's TLS
            import dask
            import distributed  # noqa: F401
        except ImportError as error:
            raise RuntimeUnavailableError(
                f"--workers needs Dask with TLS, which cannot be imported ({error})",
                "Install it: pip install 'edgeq[distributed]'",
            ) from error
        stack.enter_context(dask.config.set({**_CONFIG, **settings}))
        client = thread.submit(_connected, text, stack)
        if not text.isdecimal():
            client.result()
        yield Workers(client.result)


def _connected(text: str, stack: ExitStack) -> Any:
    """Return a client of checked workers, closed by `stack`."""
    import distributed

    try:
        address: Any = _local_cluster(int(text), stack) if text.isdecimal() else text
        # On a cluster the workers may be out of reach; on one machine the scheduler, in this process, is a detour.
        direct = text.isdecimal()
        client = stack.enter_context(
            distributed.Client(address, timeout=_CONNECT_S, set_as_default=False, direct_to_workers=direct)
        )
        client.wait_for_workers(1, timeout=_CONNECT_S)
    except RuntimeError as error:
        raise RuntimeUnavailableError(
            f"workers did not start: {' '.join(str(error).split())}",
            'Look at what they print; a script must use workers under `if __name__ == "__main__":`: they import it',
        ) from error
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
    return client


@dataclass(frozen=True)
class Files:
    """Describe a file or folder with what belongs to it.

    Attributes:
        path: absolute.
        names: of all its files, relative to the folder that holds `path`.
        sha256: of their names and contents.
        contents: by name, where workers do not see them.
    """

    path: Path
    names: tuple[str, ...]
    sha256: str
    contents: Mapping[str, bytes] | None = None

    def here(self) -> bool:
        """Return whether this process sees the same files at the same place."""
        try:
            return _digest(self.path.parent, self.names) == self.sha256
        except OSError:
            return False

    def place(self, stack: ExitStack) -> Path:
        """Return where they lie in a worker: at their own place, or in a temporary folder that `stack` removes."""
        if self.contents is None:
            return self.path
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgeq-worker-")))
        for name, content in self.contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder / self.path.name


def files_for(workers: Workers, path: Path, beside: Iterable[Path] = ()) -> Files:
    """Return the file or folder `path`, and the files `beside` it that it needs, as all `workers` can have them."""
    path = path.absolute()
    found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path, *map(Path.absolute, beside)]
    names = tuple(dict.fromkeys(file.relative_to(path.parent).as_posix() for file in found))
    files = Files(path, names, _digest(path.parent, names))
    if workers.everywhere(Files.here, files):
        return files
    return replace(files, contents={name: (path.parent / name).read_bytes() for name in names})


def _digest(folder: Path, names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        with (folder / name).open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
            # Names that are not UTF-8 hold lone surrogates.
            digest.update(f"{name}\0{content}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
