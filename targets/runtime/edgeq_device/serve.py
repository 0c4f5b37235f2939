"""Sessions for another process, which is `edgeq_device.guest`: requests on standard input, answers on standard output.

`python -I` runs `main` for a plug-in engine on a device; edgeq_guest.py adds what the workstation needs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.arrays import one_array
from edgeq_device.budget import lift_seconds
from edgeq_device.engines import EngineSpec, plugin_of, read_engine
from edgeq_device.frames import read_frame, write_frame
from edgeq_device.sessions import best_threads, open_session
from edgeq_device.variants import Variant

Arrays = Dict[str, "np.ndarray[Any, Any]"]
Request = Dict[str, Any]


def main() -> int:
    """Serve a plug-in engine's sessions."""
    return serve(open_requested)


def serve(
    open_it: Callable[[Request], Any], more: Optional[Mapping[str, Callable[[Request], Dict[str, Any]]]] = None
) -> int:
    """Answer requests until there are no more.

    Args:
        open_it: opens the session of a request.
        more: answers other requests, by what they want done; arrays in an answer are sent as such.
    """
    lift_seconds()  # whoever asks waits a limited time for each answer
    # What anybody prints must not come between the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sessions: List[Any] = []
    while True:
        frame = read_frame(sys.stdin.buffer)
        if frame is None:
            return 0
        request, arrays = frame
        try:
            if more and request["do"] in more:
                found = more[request["do"]](request)
                arrays = {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
                write_frame(answers, {name: value for name, value in found.items() if name not in arrays}, arrays)
            else:
                write_frame(answers, *_answer(request, arrays, sessions, open_it))
        except Exception as error:  # whatever it is, it is reported to the other side
            write_frame(answers, {"error": " ".join(str(error).split()), "kind": type(error).__name__}, {})


def open_request(variant: Variant, threads: int, precision: str) -> Request:
    """What another process needs to open `variant`."""
    engine = plugin_of(variant.ep)
    return {
        "name": variant.name,
        "model": str(variant.model),
        "provider": variant.ep,
        "session_options": dict(variant.session_options),
        "provider_options": dict(variant.provider_options),
        "optimization": variant.info.get("optimization", "all"),
        "threads": threads or best_threads(variant),
        "engine": engine.to_dict() if engine is not None else None,
        "precision": precision,
        "manifest": variant.bundle,
    }


def open_requested(request: Request) -> Any:
    """A session, opened by the very code that opens a bundle's variant; under the profiler, if that is wanted."""
    variant, engine = requested_variant(request), requested_engine(request)
    return open_session(variant, request["threads"], engine, profile=request.get("profile", ()))


def requested_engine(request: Request) -> Optional[EngineSpec]:
    """The engine that a request to open a session names."""
    return read_engine(request["engine"]) if request["engine"] is not None else None


def requested_variant(request: Request) -> Variant:
    """The variant that a request to open one describes."""
    return Variant(
        name=request["name"],
        component="model",
        ep=request["provider"],
        model=Path(request["model"]),
        session_options=request["session_options"],
        provider_options=request.get("provider_options", {}),
        architecture="any",
        required_features=(),
        rank=0,
        min_onnxruntime="",
        cases=(),
        tolerance={},
        info={"optimization": request["optimization"], "precision": request["precision"]},
        bundle=request.get("manifest", ""),
    )


class _Session:
    """A session and the runners of its queries."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.runners: List[Any] = []


def _answer(
    request: Request, arrays: Arrays, sessions: List[Any], open_it: Callable[[Request], Any]
) -> Tuple[Dict[str, Any], Arrays]:
    if request["do"] == "open":
        session = open_it(request)
        sessions.append(_Session(session))
        inputs, outputs = _specs(session.get_inputs()), _specs(session.get_outputs())
        made = {"inputs": inputs, "outputs": outputs, "providers": list(session.get_providers())}
        return {"session": len(sessions) - 1, **made}, {}
    opened = sessions[request["session"]]
    if request["do"] == "run":
        results = dict(zip(request["outputs"], map(one_array, opened.session.run(request["outputs"], arrays))))
        return {}, {name: value for name, value in results.items() if not value.dtype.hasobject}
    if request["do"] == "end profiling":
        return {"profile": opened.session.end_profiling()}, {}
    if request["do"] == "prepare":
        return _prepare(request, arrays, opened)
    if request["do"] == "burst":
        return _burst(request, opened.runners[request["runner"]])
    if request["do"] == "close":
        sessions[request["session"]] = None
        return {}, {}
    raise ValueError("unknown request %r" % request["do"])


def _prepare(request: Request, arrays: Arrays, opened: _Session) -> Tuple[Dict[str, Any], Arrays]:
    """A runner of queries; the samples' inputs come as "0 name", "1 name" ..."""
    from edgeq_device.scenarios import query_runner

    feeds: List[Dict[str, Any]] = [{} for _ in range(request["samples"])]
    for key, value in arrays.items():
        index, _, name = key.partition(" ")
        feeds[int(index)][name] = value
    opened.runners.append(query_runner(opened.session, feeds, **request["queries"]))
    return {"runner": len(opened.runners) - 1}, {}


def _burst(request: Request, runner: Any) -> Tuple[Dict[str, Any], Arrays]:
    from edgeq_device.environment import Watch
    from edgeq_device.latency import Bursts, burst, quiet_collector

    spent = time.process_time()
    with quiet_collector(), Watch(time.perf_counter) as watch:
        taken = burst(runner, Bursts(request["length_s"], request["lead_in_s"]), request["slow"], watch)
    arrays = {"samples": np.array(taken.samples, np.float64), "disturbed": taken.disturbed}
    return {"busy_s": taken.busy_s, "cpu_s": time.process_time() - spent}, arrays


def _specs(values: Sequence[Any]) -> List[Any]:
    return [[value.name, value.type, list(value.shape)] for value in values]
