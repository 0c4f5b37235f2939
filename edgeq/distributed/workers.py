"""Share work among processes. `open_workers` takes a number of processes or the address of a Dask scheduler, and
`Workers.map` runs a job for each item.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import multiprocessing
import os
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from edgeq_device.system.files import open_file, read_file
from edgeq_device.system.places import scratch_folder

from edgeq import __version__
from edgeq.errors import DataError, RuntimeUnavailableError, UsageError

# multiprocessing starts Python with -c. Without PYTHONSAFEPATH, Python would look for multiprocessing's own modules in
# the working directory. These variables also replace Dask's default ones, which make glibc return the memory of every
# image to the system at once. That causes 12 times as many page faults and takes a fifth of the run time.
_ENVIRONMENT = dict.fromkeys(("PYTHONSAFEPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# "forkserver" is multiprocessing's own default on Linux since Python 3.14. It imports slow modules once for all
# workers, while this process does other work. On other systems, the system's libraries do not survive a fork.
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
_SHARED = ("distributed", "onnx_ir", "onnxruntime", "PIL.Image")


@contextmanager
def starting(modules: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield Dask's options for worker processes. During the `with` block, set the environment variables that workers
    need when they start.

    On Linux, also start the process from which the workers are forked.

    Args:
        modules: modules for that process to import, once for all workers.
    """
    original_values = {name: os.environ.get(name) for name in _ENVIRONMENT}
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
        for name, value in original_values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start_cluster(count: int, stack: ExitStack) -> Any:
    """Return a cluster on this machine's loopback device. The cluster keeps its files in its own folder.

    Anyone who can connect to the cluster can run code, and every user of the machine can reach the loopback device. So
    the cluster uses TLS with a key that only its processes have.
    """
    from distributed import LocalCluster

    cluster = LocalCluster(
        n_workers=count,
        threads_per_worker=1,
        processes=True,
        dashboard_address="127.0.0.1:0",
        scheduler_kwargs={"dashboard": False},
        memory_limit=None,  # only the system's own limit applies, as in a run without workers
        local_directory=str(stack.enter_context(scratch_folder("edgeq-workers-"))),
        silence_logs=logging.CRITICAL,
        security=True,
        preload=["edgeq.distributed.plugin"],
    )
    return stack.enter_context(cluster)


Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result", covariant=True)


class WorkerJob(Protocol[Item, Result]):
    """Define the work of the workers. Each worker receives the job once, as a pickle."""

    def open(self, stack: ExitStack) -> Callable[[Item], Result]:
        """Prepare the job in a worker, and return the function that runs it for one item. Register on `stack`
        everything that must be closed at the end.
        """
        ...


def read_versions() -> dict[str, str]:
    """Return the versions of edgeq, numpy and onnxruntime in this process, with "none" for a missing package."""
    by_package = {"edgeq": __version__}
    for name in ("numpy", "onnxruntime"):
        try:
            by_package[name] = str(importlib.import_module(name).__version__)
        except ImportError:
            by_package[name] = "none"
    return by_package


def check_versions(expected: Mapping[str, str]) -> None:
    """Refuse to work in a process whose package versions differ from `expected`, because its results would differ.

    Raises:
        RuntimeUnavailableError: a package has another version; the message names the first such package.
    """
    for name, installed in read_versions().items():
        if installed != expected.get(name):
            raise RuntimeUnavailableError(
                f"a worker has {name} {installed}, and this process has {expected.get(name)}",
                "Install the same versions everywhere",
            )


_ADDRESS = re.compile(r"(tcp|tls|ucx|ws|wss)://[^@]+")
_MOST = 4096
_CONNECT_S = 10
# The number of results per thread that may wait for an earlier result. This limit keeps the use of memory from growing
# with the number of items.
_WAITING = 4
# Seconds between two checks of the workers, seconds to wait for a dead worker's replacement, and seconds to wait for a
# result.
_LOOK_S, _RESTART_S, _FETCH_S = 0.5, 120.0, 60.0
# An item that has ended this many workers is not tried again.
_MOST_DEATHS = 2
_CONFIG = {
    # A streamed item contains its samples. The code that makes the item limits its size, so Dask need not warn.
    "distributed.admin.large-graph-warning-threshold": "1GiB",
}


class Workers:
    """Control open workers. `open_workers` makes this object.

    Args:
        client: function that returns a Dask client. It is called when the client is first needed.
    """

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
        """Return whether `question`, a function at module level, returns True in every worker."""
        return all(self._client.run(question, *arguments).values())

    def map(self, job: WorkerJob[Item, Result], items: Iterable[Item]) -> Iterator[Result]:
        """Run `job` for each item, and yield the results in the order of the items.

        Each worker thread has one item at a time, and gets the next one when its last result has arrived in this
        process. If a worker dies, only the items that it had must run again.

        Raises:
            DataError: two workers died while they ran the same item.
            RuntimeUnavailableError: the scheduler is gone.
            EdgeqError: any error that the job raises.
        """
        from edgeq.distributed.plugin import JobPlugin, run_item

        name = f"edgeq-{secrets.token_hex(8)}"
        try:
            self._client.register_plugin(JobPlugin(job.open, partial(check_versions, read_versions())), name=name)
        except ImportError as error:
            raise RuntimeUnavailableError(
                f"a worker cannot import {error.name}",
                "A task or function of your own must be in a module that workers can import",
            ) from error
        crew = _Crew(self._client)
        limit = _WAITING * max(1, len(crew.free))
        pending: deque[_Pending] = deque()
        remaining = iter(items)
        upcoming = next(remaining, None)  # fetched in advance, so that it is ready when a worker becomes free
        try:
            while pending or upcoming is not None:
                for entry in pending:
                    if entry.fetch():
                        crew.release(entry.worker)
                gone = crew.find_gone()
                for entry in pending:
                    entry.lose(gone)
                idle = next((entry for entry in pending if not entry.worker), None)
                if crew.free and idle is not None:
                    worker = crew.free.popleft()
                    idle.worker = worker
                    idle.future = self._client.submit(run_item, name, idle.item, pure=False, workers=worker)
                elif crew.free and upcoming is not None and len(pending) < limit:
                    pending.append(_Pending(upcoming))
                    upcoming = next(remaining, None)
                elif pending and pending[0].fetched:
                    yield pending.popleft().result()
                else:
                    with _explained(), self._client.as_current():
                        crew.wait([entry.future for entry in pending if entry.worker and not entry.fetched])
        finally:
            self._client.cancel([entry.future for entry in pending if entry.worker and not entry.fetched])
            self._forget(name)

    def _forget(self, name: str) -> None:
        # A worker that has just started or has ended does not have the plugin.
        with suppress(KeyError, OSError):
            self._client.unregister_worker_plugin(name)


class _Crew:
    """Keep track of the current workers, and assign each item to one of them by name.

    If Dask assigned the items, it would give an item to a worker even before that worker's last result is fetched. It
    would also run another item before it runs a dead worker's item again.

    Attributes:
        free: addresses of workers, once for each idle thread.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._addresses: set[str] = set()
        self.free: deque[str] = deque()
        self._look = 0.0
        self.find_gone()

    def find_gone(self) -> set[str]:
        """Return the workers that have ended since the last check, and add new workers to `free`.

        Checks are at least half a second apart. A call before the next check returns an empty set.
        """
        if time.monotonic() < self._look:
            return set()
        threads = self._client.nthreads()
        self._look = time.monotonic() + _LOOK_S
        gone, new = self._addresses - set(threads), set(threads) - self._addresses
        self._addresses = set(threads)
        self.free = deque(address for address in self.free if address not in gone)
        self.free += [address for address in threads if address in new for _ in range(threads[address])]
        return gone

    def release(self, worker: str) -> None:
        """Mark one thread of a worker as idle."""
        if worker in self._addresses:
            self.free.append(worker)

    def wait(self, futures: Sequence[Any]) -> None:
        """Wait until a future is done, or until it is time to check for workers that started or ended."""
        from distributed import wait

        try:
            if futures:
                wait(futures, timeout=_LOOK_S, return_when="FIRST_COMPLETED")
            else:
                self._client.wait_for_workers(1, timeout=_RESTART_S)
        except TimeoutError as error:
            if not futures:
                raise RuntimeUnavailableError("all workers ended", "Check whether they ran out of memory") from error


class _Pending:
    """Track an item until its result is returned. The result is fetched as soon as it exists, so it survives the end of
    its worker.

    Attributes:
        worker: address of the worker that runs or has run the item; "" if there is none.
        fetched: whether the result has arrived, or the item has failed.
    """

    def __init__(self, item: object) -> None:
        self.item, self.worker = item, ""
        self.future: Any = None
        self.fetched = False
        self._deaths = 0
        self._results: list[Any] = []

    def fetch(self) -> bool:
        """Fetch the result if it exists, and return whether this makes the worker free. If the item failed, keep its
        error for `result`.
        """
        if self.fetched or not self.worker or not self.future.done():
            return False
        if self.future.status == "finished":
            with _explained():
                try:
                    self._results.append(self.future.result(timeout=_FETCH_S))
                except TimeoutError:  # its worker has died in the meantime
                    return False
            self.future.release()  # otherwise Dask would run the item again when its worker dies
        self.fetched = True
        return True

    def lose(self, gone: Collection[str]) -> None:
        """Make the item available to another worker if its own worker is in `gone`.

        Raises:
            DataError: two workers have now died while they ran the item.
        """
        if self.fetched or self.worker not in gone:
            return
        self.worker = ""
        self.future.release()
        self._deaths += 1
        if self._deaths == _MOST_DEATHS:
            raise DataError(
                f"{self.item}: two workers ended while they ran them (memory, or a crash in a library)",
                "Look for the sample with ⟨start⟩ and ⟨count⟩, or give the workers more memory",
            )

    def result(self) -> Any:
        """Return the result after it was fetched, or raise the item's error."""
        with _explained():
            return self._results[0] if self._results else self.future.result()


@contextmanager
def _explained() -> Iterator[None]:
    """Raise Dask's errors as edgeq errors."""
    from asyncio import CancelledError

    from distributed.comm import CommClosedError

    try:
        yield
    except (CancelledError, CommClosedError) as error:
        raise RuntimeUnavailableError("the Dask scheduler went away", "Start it again, and run this again") from error


def check_workers(text: str) -> None:
    """Check that `open_workers` would accept `text`.

    Raises:
        UsageError: `text` is neither a number of processes nor an address.
    """
    if not _ADDRESS.fullmatch(text) and not (
        text.isdecimal() and len(text) <= len(str(_MOST)) and 1 <= int(text) <= _MOST
    ):
        raise UsageError(
            f"{text!r} is neither a number of workers, from 1 to {_MOST}, nor an address",
            "Give a number of processes, or the address of a Dask scheduler, such as tcp://host:8786",
        )


@contextmanager
def open_workers(workers: int | str | Workers | None, modules: Sequence[str] = ()) -> Iterator[Workers | None]:
    """Open workers for the duration of a `with` block.

    Args:
        workers: a number of processes on this machine, with one thread each, or the address of a trusted Dask scheduler
            ("tcp://host:port"). None and workers that are already open are yielded unchanged. Processes on this machine
            start while the block already runs, so a failure to start is reported at their first use.
        modules: modules that jobs need; processes on this machine import them while they start.

    Raises:
        UsageError: `workers` is neither a number of 1 or more nor an address.
        RuntimeUnavailableError: Dask is not installed, no scheduler answers, or it has no workers.
    """
    if workers is None or isinstance(workers, Workers):
        yield workers
        return
    text = str(workers)
    check_workers(text)
    # multiprocessing first imports the main script in each process that it starts. This repeats everything in the
    # script that is not under `if __name__ == "__main__":`. In such a process, exit here. The parent process raises the
    # error that explains why.
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
                f"⟨workers⟩ needs Dask with TLS, which cannot be imported ({error})",
                "Install it: pip install distributed cryptography",
            ) from error
        stack.enter_context(dask.config.set({**_CONFIG, **settings}))
        client = thread.submit(_connect, text, stack)
        if not text.isdecimal():
            client.result()
        yield Workers(client.result)


def _connect(text: str, stack: ExitStack) -> Any:
    """Return a client whose workers have been checked. `stack` closes the client."""
    import distributed

    try:
        address: Any = _start_cluster(int(text), stack) if text.isdecimal() else text
        # On a cluster, this process may be unable to reach the workers, so the scheduler passes everything on. On one
        # machine, that would be a detour.
        direct = text.isdecimal()
        client = stack.enter_context(
            distributed.Client(address, timeout=_CONNECT_S, set_as_default=False, direct_to_workers=direct)
        )
        client.wait_for_workers(1, timeout=_CONNECT_S)
    except RuntimeError as error:
        raise RuntimeUnavailableError(
            f"workers did not start: {' '.join(str(error).split())}",
            'Look at their output. A script must use workers under `if __name__ == "__main__":`: workers import it',
        ) from error
    except (OSError, TimeoutError, ValueError) as error:
        raise RuntimeUnavailableError(
            f"no Dask workers at {text}: {' '.join(str(error).split())}", "Start the scheduler, and workers for it"
        ) from error
    try:
        client.run(check_versions, read_versions())
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"a worker of {text} cannot import edgeq ({error})", "Install edgeq where the workers run"
        ) from error
    return client


@dataclass(frozen=True)
class Files:
    """Describe a file or folder together with the files that belong to it.

    Attributes:
        path: absolute path of the file or folder.
        names: names of all the files, relative to the folder that contains `path`.
        sha256: hash of the names and contents.
        contents: contents by name, if the workers cannot see the files.
    """

    path: Path
    names: tuple[str, ...]
    sha256: str
    contents: Mapping[str, bytes] | None = None

    def is_visible(self) -> bool:
        """Return whether this process sees the same files at the same path."""
        try:
            return _hash_files(self.path.parent, self.names) == self.sha256
        except OSError:
            return False

    def place(self, stack: ExitStack) -> Path:
        """Return the path of the files in a worker: their original path, or a path in a temporary folder that `stack`
        removes.
        """
        if self.contents is None:
            return self.path
        folder = stack.enter_context(scratch_folder("edgeq-worker-"))
        for name, content in self.contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder / self.path.name


def share_files(workers: Workers, path: Path, companions: Iterable[Path] = ()) -> Files:
    """Return the file or folder `path` in a form that all `workers` can use. For a file, the result includes the files
    in `companions`, which that file needs.
    """
    path = path.absolute()
    sources = (
        sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path, *map(Path.absolute, companions)]
    )
    names = tuple(dict.fromkeys(file.relative_to(path.parent).as_posix() for file in sources))
    files = Files(path, names, _hash_files(path.parent, names))
    if workers.everywhere(Files.is_visible, files):
        return files
    return replace(files, contents={name: read_file(path.parent / name) for name in names})


def _hash_files(folder: Path, names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        with open_file(folder / name) as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
            # A name that is not UTF-8 contains lone surrogates, which plain UTF-8 cannot encode.
            digest.update(f"{name}\0{content}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
