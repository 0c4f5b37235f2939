"""`edgeq` and `python -m edgeq`."""

from __future__ import annotations

import signal

# While modules are loading there is nothing to clean up: Ctrl-C ends the program at once and without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from edgeq.cli import main

if __name__ == "__main__":
    main()
