"""What edgeq runs inside an emulated machine, or in a process of its own for a plug-in engine: it opens models as a
device would and answers requests that come over standard input, on standard output, in the frames of
edgeq_device/frames.py.

Needs Python 3.9 or newer, numpy and onnxruntime, and edgeq_device beside it.

Python runs isolated, and the first argument says where modules are looked for before elsewhere, as PYTHONPATH would.

With `--mask LIBRARY` the library's traps answer in place of CPUID (edgeq/emulate/cpuid_mask.c); each further argument
"LEAF:SUBLEAF:REGISTER:BITS" takes bits out of the answer. The path then leads to the copy of onnxruntime
whose CPUID instructions are traps.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

if __name__ == "__main__":
    sys.path[:0] = sys.argv.pop(1).split(os.pathsep)

import numpy as np
from edgeq_device import cpuid
from edgeq_device.features import gather, normalise_architecture, parse_hwcap, read_hwcap
from edgeq_device.frames import read_frame, write_frame

Arrays = Dict[str, "np.ndarray[Any, Any]"]


def main(arguments: Sequence[str]) -> int:
    """Answer requests until there are no more."""
    # What anybody prints must not come between the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    shim = _mask(arguments[1], arguments[2:]) if arguments[:1] == ["--mask"] else None
    sessions: List[_Session] = []
    while True:
        frame = read_frame(sys.stdin.buffer)
        if frame is None:
            return 0
        request, arrays = frame
        try:
            write_frame(answers, *_answer(request, arrays, sessions, shim))
        except Exception as error:  # whatever it is, it is reported to the other side
            write_frame(answers, {"error": " ".join(str(error).split()), "kind": type(error).__name__}, {})


class _Session:
    """A session and the runners of its queries."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.runners: List[Any] = []


def _answer(request: Dict[str, Any], arrays: Arrays, sessions: List[Any], shim: Any) -> Tuple[Dict[str, Any], Arrays]:
    if request["do"] == "features":
        return _features(request, shim), {}
    if request["do"] == "open":
        session = _open(request)
        sessions.append(_Session(session))
        inputs, outputs = _specs(session.get_inputs()), _specs(session.get_outputs())
        made = {"inputs": inputs, "outputs": outputs, "providers": list(session.get_providers())}
        return {"session": len(sessions) - 1, **made}, {}
    opened = sessions[request["session"]]
    if request["do"] == "run":
        results = dict(zip(request["outputs"], opened.session.run(request["outputs"], arrays)))
        return {}, {name: value for name, value in results.items() if isinstance(value, np.ndarray)}
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


def _prepare(request: Dict[str, Any], arrays: Arrays, opened: _Session) -> Tuple[Dict[str, Any], Arrays]:
    """A runner of queries; the samples' inputs come as "0 name", "1 name" ..."""
    from edgeq_device.scenarios import query_runner

    feeds: List[Dict[str, Any]] = [{} for _ in range(request["samples"])]
    for key, value in arrays.items():
        index, _, name = key.partition(" ")
        feeds[int(index)][name] = value
    opened.runners.append(query_runner(opened.session, feeds, **request["queries"]))
    return {"runner": len(opened.runners) - 1}, {}


def _burst(request: Dict[str, Any], runner: Any) -> Tuple[Dict[str, Any], Arrays]:
    from edgeq_device.disturbance import Watch
    from edgeq_device.latency import Bursts, burst, quiet_collector

    spent = time.process_time()
    with quiet_collector(), Watch(time.perf_counter) as watch:
        taken = burst(runner, Bursts(request["length_s"], request["lead_in_s"]), request["slow"], watch)
    arrays = {"samples": np.array(taken.samples, np.float64), "disturbed": taken.disturbed}
    return {"busy_s": taken.busy_s, "cpu_s": time.process_time() - spent}, arrays


def _features(request: Dict[str, Any], shim: Any) -> Dict[str, Any]:
    """What the CPU itself reports: /proc/cpuinfo may be the host's."""
    evidence = gather()
    architecture = normalise_architecture(evidence.machine)
    if evidence.cpuid is not None:
        found = cpuid.features(evidence.cpuid) - set(request["masked"])
    else:
        found = parse_hwcap(*read_hwcap(evidence.auxv))
    answer = {
        "architecture": architecture,
        "features": sorted(found),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "numpy": np.__version__,
    }
    if request["runtime"]:
        from edgeq_device.sessions import onnxruntime

        answer["onnxruntime"] = str(onnxruntime().__version__)
        answer["trapped"] = shim.edgeq_mask_count() if shim is not None else 0
    return answer


def _open(request: Dict[str, Any]) -> Any:
    """A session, opened by the very code that opens it on a device."""
    from edgeq_device.engines import open_engine, read_engine
    from edgeq_device.options import ignore_options_in_models
    from edgeq_device.session_options import BRIEF_SPIN, session_options
    from edgeq_device.sessions import onnxruntime, open_session
    from edgeq_device.variants import Variant

    if request["profile"]:
        return _open_profiled(request)
    if request["engine"] is not None:
        ignore_options_in_models()
        ort, threads = onnxruntime(), request["threads"]
        options = session_options(
            ort,
            config={**BRIEF_SPIN, **request["session_options"]},
            threads=threads,
            optimization=request["optimization"],
        )
        engine = read_engine(request["engine"])
        return open_engine(ort, engine, request["model"], options, precision=request["precision"], threads=threads)
    variant = Variant(
        name=request["name"],
        component="model",
        ep=request["provider"],
        model=Path(request["model"]),
        session_options=request["session_options"],
        provider_options=request["provider_options"],
        architecture="any",
        required_features=(),
        rank=0,
        min_onnxruntime="",
        cases=(),
        tolerance={},
        info={"optimization": request["optimization"]},
    )
    return open_session(variant, request["threads"])


def _open_profiled(request: Dict[str, Any]) -> Any:
    """A session under onnxruntime's profiler, which also writes the optimised graph."""
    from edgeq_device.session_options import BRIEF_SPIN, session_options
    from edgeq_device.sessions import onnxruntime

    ort = onnxruntime()
    config = {**BRIEF_SPIN, **request["session_options"]}
    options = session_options(ort, config=config, threads=request["threads"], optimization=request["optimization"])
    options.enable_profiling = True
    options.profile_file_prefix, options.optimized_model_filepath = request["profile"]
    return ort.InferenceSession(request["model"], options, providers=[request["provider"]])


def _specs(values: Sequence[Any]) -> List[Any]:
    return [[value.name, value.type, list(value.shape)] for value in values]


def _mask(library: str, bits: Sequence[str]) -> Any:
    shim = ctypes.CDLL(library)
    shim.edgeq_mask_count.restype = ctypes.c_ulong
    shim.edgeq_mask_clear.argtypes = [ctypes.c_uint32] * 4
    for text in bits:
        if shim.edgeq_mask_clear(*(int(part, 0) for part in text.split(":"))) != 0:
            raise ValueError("too many masks")
    if shim.edgeq_mask_install() != 0:
        raise OSError("the trap for CPUID cannot be installed")
    return shim


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
