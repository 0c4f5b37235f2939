"""Run the command line: `edgeq` and `python -m edgeq`."""

from __future__ import annotations

import os
import sys

# `python -m edgeq` looks for modules in the working directory first, where a `numpy.py` may lie next to the model.
# Where edgeq itself was found elsewhere, the directory has no part in it. -P and the program `edgeq` do not need this.
try:
    here = os.getcwd()  # noqa: PTH109 (pathlib may lie there)
except FileNotFoundError:  # it has been removed: there is nothing in it
    here = ""
if __name__ == "__main__" and not sys.flags.safe_path and here == sys.path[0] != __file__[: -len("/edgeq/__main__.py")]:
    del sys.path[0]

import atexit
import gc
import signal

# While modules are loading there is nothing to clean up: Ctrl-C ends the program at once and without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from edgeq.cli import main
from edgeq.util.registry import defer_imports

defer_imports()
# The memory of a process that ends is the system's again: looking through it for garbage once more takes 0.2 to 0.6 s.
atexit.register(gc.freeze)

if __name__ == "__main__":
    main()
