"""Workers of this machine: how their processes start."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from edgeq import __version__
from edgeq.errors import RuntimeUnavailableError

# multiprocessing starts Python with -c, which without the first one looks in the working directory for the modules of
# multiprocessing itself. Dask's own choice also has glibc return every image's memory to the system at once: 12 times
# the page faults, a fifth of the time.
_ENVIRONMENT = dict.fromkeys(("PYTHONSAFEPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# multiprocessing's own choice on Linux from Python 3.14 on: what takes long to import is imported once for all workers,
# beside what this process does meanwhile. Elsewhere libraries of the system do not survive a fork.
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
_SHARED = ("distributed", "onnx_ir", "onnxruntime", "PIL.Image")


def imports_main() -> bool:
    """Whether this process is one that multiprocessing has started, and still imports the script that started it: what
    is not under `if __name__ == "__main__":` there runs again."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


@contextmanager
def starting(modules: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Dask's settings for worker processes, and, for the length of a `with` block, the environment that they start
    with; the process that they are forked from, where there is one, begins to start.

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


@contextmanager
def local_cluster(count: int) -> Iterator[Any]:
    """A cluster of this machine, on the loopback device, that keeps its files in a folder of its own.

    Who reaches it can run code, and every user of the machine reaches the loopback device: TLS with a key that these
    processes alone have keeps others out.
    """
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
            security=True,
            preload=["edgeq.distributed.preload"],
        ) as cluster,
    ):
        yield cluster


Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Job(Protocol[Item, Result]):
    """What workers do. It travels to each of them by pickle, once."""

    def open(self, stack: ExitStack) -> Callable[[Item], Result]:
        """Make ready, in a worker; what is to be closed when it ends goes onto `stack`."""
        ...


def versions() -> dict[str, str]:
    """Of edgeq, numpy and onnxruntime, in this process; "none" for what is not installed."""
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
