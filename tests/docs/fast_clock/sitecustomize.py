"""Speed up the clock of processes that run the pages, and give their sessions one thread.

The clock runs 50 times as fast, so that a measurement of two seconds takes 40 ms. The standard library's timeouts use
the real clock, because this module imports them first. Sessions take one thread, as in the tests' own processes.
"""

import concurrent.futures
import importlib.util
import queue
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path

FACTOR = 50
REAL_CLOCK = (concurrent.futures, queue, selectors, subprocess, threading)

_sleep, _perf_counter, _monotonic = time.sleep, time.perf_counter, time.monotonic
time.sleep = lambda seconds: _sleep(seconds / FACTOR)
time.perf_counter = lambda: _perf_counter() * FACTOR
time.monotonic = lambda: _monotonic() * FACTOR


class _OneThread:
    """Find onnxruntime, and call tests/one_thread.py after its import."""

    def find_spec(self, name, path=None, target=None):
        if name != "onnxruntime":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found is not None:
            load = found.loader.exec_module
            found.loader.exec_module = lambda module: (load(module), _one_thread())
        return found


def _one_thread():
    spec = importlib.util.spec_from_file_location("one_thread", Path(__file__).parents[2] / "one_thread.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.one_thread()


sys.meta_path.insert(0, _OneThread())
