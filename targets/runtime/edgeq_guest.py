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
from typing import Any, Dict, Sequence, Tuple

if __name__ == "__main__":
    sys.path[:0] = sys.argv.pop(1).split(os.pathsep)

import numpy as np
from edgeq_device import cpuid
from edgeq_device.features import gather, normalise_architecture, parse_hwcap, read_hwcap
from edgeq_device.serve import open_requested, serve


def main(arguments: Sequence[str]) -> int:
    """Answer requests until there are no more."""
    shim = _mask(arguments[1], arguments[2:]) if arguments[:1] == ["--mask"] else None
    more = {"features": lambda request: _features(request, shim), "assign": _assign, "compile": _compile}
    return serve(_open, more)


def _assign(request: Dict[str, Any]) -> Dict[str, Any]:
    """Which provider takes which nodes, graph by graph."""
    ort, options = _engine_options(request)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(request["model"], options)
    graphs = session.get_provider_graph_assignment_info()
    return {"graphs": [[graph.ep_name, [node.name for node in graph.get_nodes()]] for graph in graphs]}


def _compile(request: Dict[str, Any]) -> Dict[str, Any]:
    """The model as the engine has compiled it, with the engine's own form of it inside."""
    ort, options = _engine_options(request)
    compiler = ort.ModelCompiler(options, request["model"], embed_compiled_data_into_model=True)
    compiler.compile_to_file(request["output"])
    return {}


def _engine_options(request: Dict[str, Any]) -> Tuple[Any, Any]:
    """onnxruntime, and options with the request's engine in them."""
    from edgeq_device.engines import add_engine, read_engine
    from edgeq_device.session_options import BRIEF_SPIN, session_options
    from edgeq_device.sessions import onnxruntime

    ort = onnxruntime()
    options = session_options(ort, config=BRIEF_SPIN, threads=0, optimization="all")
    add_engine(ort, read_engine(request["engine"]), options)
    return ort, options


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
    return _open_profiled(request) if request["profile"] else open_requested(request)


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
