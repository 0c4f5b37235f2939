"""How much memory a model takes: measured in a process of its own, as two sessions in one cannot be separated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence

from edgeq_device.children import python_command
from edgeq_device.engines import FLOAT, EngineSpec, open_engine, read_engine
from edgeq_device.environment import ROOT, read_memory
from edgeq_device.errors import RuntimeUnavailableError

_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class MemoryUse:
    """Resident memory in bytes.

    Attributes:
        load_bytes: growth by opening the session.
        session_peak_bytes: the largest growth while opening it and running a few samples.
        process_peak_bytes: the whole process at most: interpreter, onnxruntime and session.
    """

    load_bytes: int
    session_peak_bytes: int
    process_peak_bytes: int

    def to_dict(self) -> Dict[str, int]:
        """The figures in bytes under their own names."""
        return asdict(self)


def measure_memory(
    model: Path,
    *,
    shapes: Optional[Mapping[str, Sequence[int]]] = None,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    provider_options: Optional[Mapping[str, str]] = None,
    config: Optional[Mapping[str, str]] = None,
    optimization: str = "all",
    threads: int = 0,
    engine: Optional[EngineSpec] = None,
    precision: str = FLOAT,
    timeout_s: float = 300.0,
) -> MemoryUse:
    """Open `model` in a fresh process, run it five times on made-up inputs, and read that process's memory.

    Args:
        shapes: of inputs with open sizes; see `feeds.random_feeds`.
        provider_options: of the first provider.
        config: session configuration entries.
        optimization: graph optimisation level: none, basic, extended or all.
        threads: intra-op threads (0: onnxruntime's choice).
        engine, precision: what executes it, in place of the providers.

    Raises:
        RuntimeUnavailableError: the process failed, took too long, or the system does not report a process's memory.
    """
    order = {
        "model": os.fspath(model),
        "shapes": {name: list(shape) for name, shape in (shapes or {}).items()},
        "providers": list(providers),
        "provider_options": dict(provider_options or {}),
        "config": dict(config or {}),
        "optimization": optimization,
        "threads": threads,
        "engine": engine.to_dict() if engine is not None else None,
        "precision": precision,
    }
    try:
        child = subprocess.run(
            python_command(f"{__package__}.memory"),
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeUnavailableError(f"the memory of {model} could not be measured: {error}") from error
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeUnavailableError(f"the memory of {model} could not be measured: {last}")
    answer = json.loads(child.stdout.strip().splitlines()[-1])
    return MemoryUse(**answer)


def _measure_here(order: Mapping[str, Any]) -> Dict[str, int]:
    import onnxruntime

    from edgeq_device.feeds import random_feeds
    from edgeq_device.options import ignore_options_in_models
    from edgeq_device.session_options import session_options

    ignore_options_in_models()
    options = session_options(
        onnxruntime, config=order["config"], threads=order["threads"], optimization=order["optimization"]
    )
    first, _ = read_memory(ROOT)
    provider_options = [order["provider_options"]] + [{}] * (len(order["providers"]) - 1)
    # onnxruntime takes the folder of external weights from that option only for a model given as bytes.
    source = Path(order["model"]).read_bytes() if _EXTERNAL_FOLDER in order["config"] else order["model"]
    if order["engine"] is not None:
        chosen = {"precision": order["precision"], "threads": order["threads"]}
        session = open_engine(onnxruntime, read_engine(order["engine"]), source, options, **chosen)
    else:
        session = onnxruntime.InferenceSession(
            source, options, providers=order["providers"], provider_options=provider_options
        )
    loaded, _ = read_memory(ROOT)
    for feed in random_feeds(session, order["shapes"], count=1) * 5:
        session.run(None, feed)
    _, peak = read_memory(ROOT)
    if first is None or loaded is None or peak is None:
        raise RuntimeUnavailableError(f"{sys.platform} does not report how much memory a process has")
    return MemoryUse(max(0, loaded - first), max(0, peak - first), peak).to_dict()


def main() -> int:
    """The child: an order as JSON on stdin, the answer as JSON on stdout, a failure as one line on stderr."""
    try:
        print(json.dumps(_measure_here(json.load(sys.stdin))))
    except Exception as error:  # the parent gives the line to its reader; a traceback would only hide it
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
