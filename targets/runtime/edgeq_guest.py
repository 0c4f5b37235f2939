"""What edgeq runs inside an emulated machine: it opens models as a device would and answers requests that come over
standard input, on standard output, in the frames of edgeq_device/frames.py.

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
    sessions: List[Any] = []
    while True:
        frame = read_frame(sys.stdin.buffer)
        if frame is None:
            return 0
        request, arrays = frame
        try:
            write_frame(answers, *_answer(request, arrays, sessions, shim))
        except Exception as error:  # whatever it is, it is reported to the other side
            write_frame(answers, {"error": " ".join(str(error).split()), "kind": type(error).__name__}, {})


def _answer(request: Dict[str, Any], arrays: Arrays, sessions: List[Any], shim: Any) -> Tuple[Dict[str, Any], Arrays]:
    if request["do"] == "features":
        return _features(request, shim), {}
    if request["do"] == "open":
        session = _open(request)
        sessions.append(session)
        inputs, outputs = _specs(session.get_inputs()), _specs(session.get_outputs())
        return {"session": len(sessions) - 1, "inputs": inputs, "outputs": outputs}, {}
    if request["do"] == "run":
        results = dict(zip(request["outputs"], sessions[request["session"]].run(request["outputs"], arrays)))
        return {}, {name: value for name, value in results.items() if isinstance(value, np.ndarray)}
    if request["do"] == "end profiling":
        return {"profile": sessions[request["session"]].end_profiling()}, {}
    if request["do"] == "close":
        sessions[request["session"]] = None
        return {}, {}
    raise ValueError("unknown request %r" % request["do"])


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
    from edgeq_device.sessions import open_session
    from edgeq_device.variants import Variant

    if request["profile"]:
        return _open_profiled(request)
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
