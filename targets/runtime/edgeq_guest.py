"""Do edgeq's work inside an emulated machine, on a board, or in a separate process for a plug-in engine.

The program opens models as a device would. It reads requests from standard input and answers on standard output, in the
frames of edgeq_device/prepare/arrays.py. It needs Python 3.9 or newer, numpy, onnxruntime, and edgeq_device next to it.
Python runs in isolated mode. The first argument is a search path for modules, which comes first, like PYTHONPATH.

With `--mask LIBRARY`, CPUID instructions of onnxruntime trap, and the library answers instead
(edgeq/emulate/cpuid_mask.c). Each further argument "LEAF:SUBLEAF:REGISTER:BITS" removes bits from the answer. The
search path then leads to a copy of onnxruntime whose CPUID instructions have been replaced by traps.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Sequence, Tuple

if __name__ == "__main__":
    sys.path[:0] = sys.argv.pop(1).split(os.pathsep)
    # Threads of numpy's BLAS spin for a second before they sleep. On an emulated CPU they spin forever. Either way,
    # they would take a core from the model that is timed.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from edgeq_device.bundle.bench_models import BenchModel, bench_models, build_bench_models, choose_variants, find_feeds
from edgeq_device.bundle.opening import open_best, start_variant
from edgeq_device.bundle.package import MAIN, open_bundle
from edgeq_device.engines.catalog import add_engine, read_engine
from edgeq_device.engines.device import read_device
from edgeq_device.engines.memory import measure_memory
from edgeq_device.engines.runtime import onnxruntime
from edgeq_device.engines.serve import open_requested, parse_variant, serve
from edgeq_device.engines.session_options import BRIEF_SPIN, session_options
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.claim import FEWEST_SESSIONS, SettlingRules, rank_until_settled
from edgeq_device.measure.latency import Bursts, WarmUp
from edgeq_device.measure.scenarios import make_runner
from edgeq_device.prepare.arrays import read_arrays
from edgeq_device.system.features import cpuid_features, gather, normalise_architecture, parse_hwcap, read_hwcap
from edgeq_device.system.files import read_file


def main(arguments: Sequence[str]) -> int:
    """Answer requests until the input ends."""
    shim = _install_mask(arguments[1], arguments[2:]) if arguments[:1] == ["--mask"] else None
    engine = {"assign": _assign_nodes, "compile": _compile}
    board = {"choose": _choose, "bench": _bench, "peak": _measure_peak, "race": _race, "read": _fetch_file}
    return serve(_open, {"features": lambda request: _read_features(request, shim), **engine, **board})


def _assign_nodes(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the nodes that each provider takes, graph by graph."""
    ort, options = _engine_options(request)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(request["model"], options)
    graphs = session.get_provider_graph_assignment_info()
    return {"graphs": [[graph.ep_name, [node.name for node in graph.get_nodes()]] for graph in graphs]}


def _compile(request: Dict[str, Any]) -> Dict[str, Any]:
    """Write the model that the engine compiles, with the engine's own code inside."""
    ort, options = _engine_options(request)
    compiler = ort.ModelCompiler(options, request["model"], embed_compiled_data_into_model=True)
    compiler.compile_to_file(request["output"])
    return {}


def _engine_options(request: Dict[str, Any]) -> Tuple[Any, Any]:
    """Return the onnxruntime module, and session options with the engine of the request."""
    ort = onnxruntime()
    options = session_options(ort, config=BRIEF_SPIN, threads=0, optimization="all")
    add_engine(ort, read_engine(request["engine"]), options)
    return ort, options


def _read_features(request: Dict[str, Any], shim: Any) -> Dict[str, Any]:
    """Return the features that the CPU itself reports, because /proc/cpuinfo may describe the host."""
    evidence = gather()
    architecture = normalise_architecture(evidence.machine)
    if evidence.cpuid is not None:
        features = cpuid_features(evidence.cpuid) - set(request["masked"])
    else:
        features = parse_hwcap(*read_hwcap(evidence.auxv))
    answer = {
        "architecture": architecture,
        "features": sorted(features),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "numpy": np.__version__,
    }
    if request["runtime"]:
        answer["onnxruntime"] = str(onnxruntime().__version__)
        # Without traps, the mask had no effect, and the workstation must know.
        answer["trapped"] = shim.edgeq_mask_count() if shim is not None else 0
    return answer


def _open(request: Dict[str, Any]) -> Any:
    return _open_best(request).session if request.get("bundle") else open_requested(request)


def _open_best(request: Dict[str, Any]) -> Any:
    """Open and return the variant of a bundle that fits this device, or the one that the request names."""
    bundle = open_bundle(request["bundle"])  # a copy of the bundle's files is kept until the process ends
    return open_best(bundle, read_device(), name=request["variant"], threads=request["threads"])


def _choose(request: Dict[str, Any]) -> Dict[str, Any]:
    best = _open_best(request)
    return {"variant": best.choice.variant.name, "passed_over": list(best.passed_over)}


def _bench(request: Dict[str, Any]) -> Dict[str, Any]:
    """Run `bench_models` on a bundle's variants, or on models. Each model is described by a request to open it."""
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in request["settings"].items()}
    feeds, notes = None, ()
    if request["bundle"]:
        variants, notes = choose_variants(open_bundle(request["bundle"]), read_device(), request["variant"])
        models = build_bench_models(variants)
        feeds = None if request["shapes"] else find_feeds(variants)
    else:
        models = [_build_bench_model(description) for description in request["models"]]
    if request["feeds"]:
        samples = [read_arrays(Path(file)) for file in request["feeds"]]
        feeds = lambda session: samples  # noqa: E731
    return bench_models(models, BenchSettings(**settings), feeds=feeds, shapes=request["shapes"], notes=notes)


def _build_bench_model(description: Dict[str, Any]) -> Any:
    """Return a model for a benchmark. `description` names a variant of a bundle, or is a request to open a model."""
    if description.get("bundle"):
        variants = open_bundle(description["bundle"]).components[MAIN]
        model = build_bench_models([variant for variant in variants if variant.name == description["variant"]])[0]
    else:
        variant = parse_variant(description)
        model = BenchModel(
            "",
            lambda threads: start_variant(variant, threads),
            lambda threads, shapes: measure_memory({**description, "threads": threads}, shapes),
        )
    return replace(model, name=description["name"], sessions=description.get("sessions", 1))


def _race(request: Dict[str, Any]) -> Dict[str, Any]:
    """Time models against each other with `rank_until_settled`, each in several sessions. Each model is described by a
    request to open it.
    """
    feeds = [read_arrays(Path(request["feed"]))]
    runners: Dict[str, Any] = {description["name"]: [] for description in request["models"]}
    # opening further sessions than a claim needs may take no longer than the timing
    end = time.perf_counter() + request["arguments"]["max_duration_s"]
    for turn in range(request["sessions"]):
        if turn >= FEWEST_SESSIONS and time.perf_counter() > end:
            break
        for description in request["models"]:
            session = start_variant(parse_variant(description), description["threads"])
            runners[description["name"]].append(make_runner(session, feeds))
    warm_up, bursts = WarmUp(**request["warmup"]), Bursts(**request["bursts"])
    ranking = rank_until_settled(runners, SettlingRules(**request["arguments"]), warmup=warm_up, bursts=bursts)
    answer: Dict[str, Any] = {
        "order": list(ranking.order),
        "settled": ranking.settled,
        "ties": [list(pair) for pair in ranking.ties],
        "rounds": ranking.rounds,
        "runners": {},
    }
    for index, (name, distribution) in enumerate(ranking.distributions.items()):
        arrays = {
            "samples_ms": distribution.samples_ms,
            "rounds": distribution.rounds,
            "disturbed": distribution.disturbed,
        }
        answer.update({f"{index} {key}": value for key, value in arrays.items()})
        figures = ("samples_per_query", "elapsed_s", "busy", "sessions", "stolen")
        answer["runners"][name] = {"index": index, **{key: getattr(distribution, key) for key in figures}}
    return answer


def _fetch_file(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the content of a file that was written on this machine, and remove the file."""
    file = Path(request["file"])
    # A frame carries arrays, so bytes travel as one.
    content = np.frombuffer(read_file(file), np.uint8)
    file.unlink()
    return {"content": content}


def _measure_peak(request: Dict[str, Any]) -> Dict[str, Any]:
    return measure_memory(request, request["shapes"]).to_dict()


def _install_mask(library: str, bits: Sequence[str]) -> Any:
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
