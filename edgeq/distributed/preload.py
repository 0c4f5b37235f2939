"""What Dask runs in each worker of this machine when it starts."""

from __future__ import annotations

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Leave Ctrl-C, which a terminal sends to all processes, to the one that ends the workers; and import what takes
    longest of all that jobs import, while the main process still prepares the first one."""
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import onnx_ir  # noqa: F401
