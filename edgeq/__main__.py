"""Run the command line, for `edgeq` and for `python -m edgeq`."""

from __future__ import annotations

import os
import sys

# `python -m edgeq` looks for modules in the working directory first, where a file such as `numpy.py` may be next to the
# model. If edgeq itself was found elsewhere, remove the working directory from the path. `python -P` and the program
# `edgeq` do not add it.
try:
    here = os.getcwd()  # noqa: PTH109 (pathlib may lie there)
except FileNotFoundError:  # the directory was removed, so no module can be in it
    here = ""
if __name__ == "__main__" and not sys.flags.safe_path and here == sys.path[0] != __file__[: -len("/edgeq/__main__.py")]:
    del sys.path[0]

import atexit
import gc
import signal

# Nothing needs to be cleaned up while modules load, so Ctrl-C ends the program at once and without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from edgeq.cli import main
from edgeq.util.registry import defer_imports

defer_imports()
# The system frees the memory of a process when it ends. A final garbage collection would take 0.2 to 0.6 s, so skip it.
atexit.register(gc.freeze)

if __name__ == "__main__":
    main()
