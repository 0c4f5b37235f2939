"""Answer the requests of a `Guest`, which runs sessions in this process as if they were its own.

`main` serves a plug-in engine on a device. edgeq_guest.py adds the requests that the workstation needs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import numpy as np

from edgeq_device.engines.catalog import FLOAT, EngineSpec, find_plugin, read_engine
from edgeq_device.engines.frames import read_frame, write_frame
from edgeq_device.engines.guest import Arrays
from edgeq_device.engines.sessions import open_session, read_best_threads
from edgeq_device.engines.variant import Variant, read_precision
from edgeq_device.measure.latency import Bursts, quiet_collector, run_burst
from edgeq_device.measure.scenarios import make_runner
from edgeq_device.measure.watch import MachineWatch
from edgeq_device.prepare.arrays import to_array
from edgeq_device.system.budget import lift_seconds

Request = Dict[str, Any]


def main() -> int:
    """Serve the sessions of a plug-in engine."""
    return serve(open_requested)


def serve(
    open_it: Callable[[Request], Any], more: Optional[Mapping[str, Callable[[Request], Dict[str, Any]]]] = None
) -> int:
    """Answer requests until the input ends.

    Args:
        open_it: function that takes a request and returns an open session.
        more: functions that answer other requests, keyed by the value of "do". Arrays in an answer are sent as arrays.
    """
    lift_seconds()  # the process that sends the request limits how long it waits for each answer
    # Text that a library prints must not end up between the frames.
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
                reply = more[request["do"]](request)
                arrays = {name: value for name, value in reply.items() if isinstance(value, np.ndarray)}
                write_frame(answers, {name: value for name, value in reply.items() if name not in arrays}, arrays)
            else:
                write_frame(answers, *_answer(request, arrays, sessions, open_it))
        except Exception as error:  # every error is reported to the other side
            write_frame(answers, {"error": " ".join(str(error).split()), "kind": type(error).__name__}, {})


def build_open_request(variant: Variant, threads: int) -> Request:
    """Return the request with which another process opens `variant`."""
    engine = find_plugin(variant.ep)
    return {
        "name": variant.name,
        "model": str(variant.model),
        "provider": variant.ep,
        "session_options": dict(variant.session_options),
        "provider_options": dict(variant.provider_options),
        "optimization": variant.info.get("optimization", "all"),
        "threads": threads or read_best_threads(variant),
        "engine": engine.to_dict() if engine is not None else None,
        "precision": read_precision(variant, engine) if engine is not None else FLOAT,
        "manifest": variant.bundle,
    }


def open_requested(request: Request) -> Any:
    """Return the session that a request describes, opened by the same code as a bundle's variant. If the request has a
    "profile", the profiler is on.
    """
    variant, engine = parse_variant(request), parse_engine(request)
    return open_session(variant, request["threads"], engine, profile=request.get("profile", ()))


def parse_engine(request: Request) -> Optional[EngineSpec]:
    """Return the engine in a request to open a session, or None if the request does not name one."""
    return read_engine(request["engine"]) if request["engine"] is not None else None


def parse_variant(request: Request) -> Variant:
    """Return the variant that a request to open a session describes."""
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


def _answer(
    request: Request, arrays: Arrays, sessions: List[Any], open_it: Callable[[Request], Any]
) -> Tuple[Dict[str, Any], Arrays]:
    """Answer a request about a session. `sessions` contains each session together with the runners of its queries."""
    if request["do"] == "open":
        session = open_it(request)
        sessions.append((session, []))
        inputs, outputs = (
            [[spec.name, spec.type, list(spec.shape)] for spec in specs]
            for specs in (session.get_inputs(), session.get_outputs())
        )
        description = {"inputs": inputs, "outputs": outputs, "providers": list(session.get_providers())}
        return {"session": len(sessions) - 1, **description}, {}
    session, runners = sessions[request["session"]]
    if request["do"] == "run":
        results = dict(zip(request["outputs"], map(to_array, session.run(request["outputs"], arrays))))
        return {}, {name: value for name, value in results.items() if not value.dtype.hasobject}
    if request["do"] == "end profiling":
        return {"profile": session.end_profiling()}, {}
    if request["do"] == "prepare":
        feeds: List[Dict[str, Any]] = [{} for _ in range(request["samples"])]
        for key, value in arrays.items():  # keys are "0 name", "1 name" ...
            # An input's name may contain spaces; the index does not.
            index, _, name = key.partition(" ")
            feeds[int(index)][name] = value
        runners.append(make_runner(session, feeds, **request["queries"]))
        return {"runner": len(runners) - 1}, {}
    if request["do"] == "burst":
        return _run_burst(request, runners[request["runner"]])
    if request["do"] == "close":
        # Keep the place, because the numbers of other sessions are places in this list.
        sessions[request["session"]] = None
        if hasattr(session, "close"):  # such a session itself runs in another process
            session.close()
        return {}, {}
    raise ValueError("unknown request %r" % request["do"])


def _run_burst(request: Request, runner: Any) -> Tuple[Dict[str, Any], Arrays]:
    spent = time.process_time()
    turn = Bursts(request["length_s"], request["lead_in_s"]), request["slow"]
    with quiet_collector(), MachineWatch(time.perf_counter) as watch:
        # A runner in another process is timed by that process.
        turn_record = runner.burst(*turn) if hasattr(runner, "burst") else run_burst(runner, *turn, watch)
    arrays = {"samples": np.array(turn_record.samples, np.float64), "disturbed": turn_record.disturbed}
    return {"busy_s": turn_record.busy_s, "cpu_s": turn_record.cpu_s or time.process_time() - spent}, arrays
