"""Measure how much memory a model takes. The model runs in a separate process, because the memory of two sessions in
one process cannot be told apart.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from edgeq_device.engines.guest import build_python_command
from edgeq_device.engines.runtime import onnxruntime
from edgeq_device.engines.serve import parse_engine, parse_variant
from edgeq_device.engines.sessions import open_unchecked
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.measure.environment import read_memory
from edgeq_device.prepare.feeds import draw_feeds
from edgeq_device.system.features import ROOT
from edgeq_device.system.programs import build_child_environment


@dataclass(frozen=True)
class MemoryUse:
    """Hold resident memory in bytes.

    Attributes:
        load_bytes: growth of the memory while the session is opened.
        session_peak_bytes: largest growth while the session is opened and runs a few samples.
        process_peak_bytes: peak of the whole process: interpreter, onnxruntime and session.
    """

    load_bytes: int
    session_peak_bytes: int
    process_peak_bytes: int

    def to_dict(self) -> Dict[str, int]:
        """Return the figures in bytes, keyed by their names."""
        return asdict(self)


def measure_memory(
    request: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], *, timeout_s: float = 300.0
) -> MemoryUse:
    """Open a session in a fresh process, run it five times on made-up inputs, and read that process's memory.

    Args:
        request: description of the model to open: see `serve.build_open_request`.
        shapes: shapes of inputs with open sizes; see `feeds.draw_feeds`.

    Raises:
        RuntimeUnavailableError: the process failed or took too long, or the system does not report a process's memory.
    """
    model = request["model"]
    order = {**request, "shapes": {name: list(shape) for name, shape in shapes.items()}}
    try:
        child = subprocess.run(
            build_python_command(f"{__package__}.memory"),
            env=build_child_environment(),
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeUnavailableError(f"the memory of {model} could not be measured: {error}") from error
    if child.returncode != 0:
        message = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeUnavailableError(f"the memory of {model} could not be measured: {message}")
    # Libraries may print lines before the answer.
    answer = json.loads(child.stdout.strip().splitlines()[-1])
    return MemoryUse(**answer)


def _read_with_guest(session: Any) -> Tuple[Optional[int], Optional[int]]:
    """Return the sum of `read_memory` over this process and the process in which the session runs, if that is another
    one.
    """
    own_memory = read_memory(ROOT)
    if not hasattr(session, "guest"):
        return own_memory
    now, peak = (
        None if own_bytes is None or guest_bytes is None else own_bytes + guest_bytes
        for own_bytes, guest_bytes in zip(own_memory, read_memory(ROOT, str(session.guest.process)))
    )
    return now, peak


def main() -> int:
    """Read a request as JSON from stdin. Write the result as JSON to stdout, or an error as one line to stderr."""
    try:
        order = json.load(sys.stdin)
        onnxruntime()
        # After the import, so that onnxruntime itself does not count as the model's memory.
        baseline, _ = read_memory(ROOT)
        session = open_unchecked(parse_variant(order), order["threads"], parse_engine(order))
        loaded, _ = _read_with_guest(session)
        # Several runs, because the first ones may still allocate.
        for feed in draw_feeds(session, order["shapes"], count=1) * 5:
            session.run(None, feed)
        _, peak = _read_with_guest(session)
        if baseline is None or loaded is None or peak is None:
            raise RuntimeUnavailableError(f"{sys.platform} does not report how much memory a process has")
        print(json.dumps(MemoryUse(max(0, loaded - baseline), max(0, peak - baseline), peak).to_dict()))
    except Exception as error:  # the parent shows only this line to the user; a traceback would hide it
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
