"""Run the command line, for `edgeq` and for `python -m edgeq`."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without its imports, which take some milliseconds
import os
import sys

# Nothing needs to be cleaned up while modules load, so Ctrl-C ends the program at once and without a traceback.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

# `python -m edgeq` looks for modules in the working directory first, where a file such as `numpy.py` may be next to the
# model. If edgeq itself was found elsewhere, remove the working directory from the path. `python -P` and the program
# `edgeq` do not add it.
try:
    here = os.getcwd()  # noqa: PTH109 (pathlib may lie there)
except FileNotFoundError:  # the directory was removed, so no module can be in it
    here = ""
if here != __file__[: -len("/edgeq/__main__.py")]:
    if __name__ == "__main__" and not sys.flags.safe_path and here == sys.path[0]:
        del sys.path[0]
    # Empty and relative entries of PYTHONPATH, as in "/opt/lib:", lead into the working directory too.
    if os.environ.get("PYTHONPATH") and not sys.flags.ignore_environment:
        entries = [e for e in os.environ["PYTHONPATH"].split(os.pathsep) if not os.path.isabs(e)]  # noqa: PTH117
        relative = [os.path.normpath(os.path.join(here, entry)) for entry in entries]  # noqa: PTH118
        sys.path[:] = [entry for entry in sys.path if entry not in relative]

import atexit
import gc

from edgeq.cli import main
from edgeq.util.deferred import defer_imports

defer_imports()
# The system frees the memory of a process when it ends. A final garbage collection would take 0.2 to 0.6 s, so skip it.
atexit.register(gc.freeze)

if __name__ == "__main__":
    main()
