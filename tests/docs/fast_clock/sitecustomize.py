"""On the path of processes that run the pages: their clock is 50 times as fast, so that what measures for two seconds
takes 40 ms. Timeouts of the standard library keep the real clock: they bind it when they are imported, here."""

import concurrent.futures
import queue
import selectors
import subprocess
import threading
import time

FACTOR = 50
REAL_CLOCK = (concurrent.futures, queue, selectors, subprocess, threading)

_sleep, _perf_counter, _monotonic = time.sleep, time.perf_counter, time.monotonic
time.sleep = lambda seconds: _sleep(seconds / FACTOR)
time.perf_counter = lambda: _perf_counter() * FACTOR
time.monotonic = lambda: _monotonic() * FACTOR
