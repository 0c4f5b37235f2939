"""Sessions on an NVIDIA GPU: the provider has really started, the engine is there, buffers stay on the device."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from typing import Any, Callable, Dict, List, Tuple

from edgeq_device.arrays import read_arrays
from edgeq_device.binding import BoundSession
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.gpu import read_gpus
from edgeq_device.infer import infer
from edgeq_device.select import CPU, Device
from edgeq_device.tensorrt import PROVIDER, read_tensorrt
from edgeq_device.tensorrt_engine import Engine, describe_engine, is_tensorrt, plan_engine, static_shapes, trtexec_line
from edgeq_device.terminal import printable
from edgeq_device.variants import Variant

CUDA = "CUDAExecutionProvider"
GPU_PROVIDERS = (PROVIDER, CUDA)
_GRAPHS = {CUDA: "enable_cuda_graph"}
_TENSORRT_GRAPHS = "trt_cuda_graph_enable"

OpenWith = Callable[[List[Any]], Any]


def open_on_gpu(variant: Variant, ort: Any, open_with: OpenWith) -> BoundSession:
    """Open `variant`, build its engine if there is none yet, and run it once so that nothing is left to do later.

    Args:
        open_with: opens the session with a list of providers.

    Raises:
        RuntimeUnavailableError: the provider does not start. ONNX Runtime itself would go on on the CPU.
    """
    preload = getattr(ort, "preload_dlls", None)
    if preload is not None:
        with redirect_stdout(sys.stderr):  # it prints what it does not find, and stdout may be for JSON
            preload(directory="")  # CUDA and cuDNN from their wheels, where they are installed so
    if not is_tensorrt(variant):
        session = _started(variant, ort, open_with([(variant.ep, dict(variant.provider_options)), CPU]))
        return BoundSession(_with_graphs(variant, ort, open_with, session, {}), ort, "cuda")
    tensorrt, problem = read_tensorrt(ort)
    if problem:
        raise RuntimeUnavailableError(f"variant {variant.name}: {problem}")
    gpus, _ = read_gpus()
    engine = plan_engine(variant, Device("", frozenset(), str(ort.__version__), (), gpus, "", tensorrt, ""))
    if not engine.cached:
        print(
            f"building a TensorRT engine for {gpus[0].name if gpus else 'this GPU'}: this takes minutes, once",
            file=sys.stderr,
            flush=True,
        )
    start = time.perf_counter()
    session = _started(variant, ort, open_with([(variant.ep, engine.options), CUDA, CPU]))
    session = _with_graphs(variant, ort, open_with, session, engine.options)
    # One BoundSession for good: a captured CUDA graph goes on using its buffers.
    bound = BoundSession(session, ort, "cuda")
    shapes = _first_run(variant, bound)
    notes = _notes(variant, engine, tensorrt, shapes, time.perf_counter() - start)
    if not engine.cached:
        print(printable(notes[0]), file=sys.stderr, flush=True)
    bound.notes = tuple(notes)
    return bound


def _started(variant: Variant, ort: Any, session: Any) -> Any:
    if variant.ep not in session.get_providers():
        raise RuntimeUnavailableError(
            f"onnxruntime {ort.__version__} lists {variant.ep} and cannot start it here",
            "Look at its messages above: a library of CUDA, cuDNN or TensorRT is missing or of another version",
        )
    return session


def _with_graphs(variant: Variant, ort: Any, open_with: OpenWith, session: Any, options: Dict[str, str]) -> Any:
    """The session again with CUDA graphs, where all sizes are fixed: one launch then replays the whole model.

    The engine is in its cache by now. Where the provider refuses (the graph is split between providers), it is the
    session without.
    """
    if not (static_shapes(session.get_inputs()) and static_shapes(session.get_outputs())):
        return session
    chosen = {**(options or variant.provider_options), _GRAPHS.get(variant.ep, _TENSORRT_GRAPHS): "1"}
    providers = [(variant.ep, chosen), *([CUDA] if is_tensorrt(variant) else []), CPU]
    try:
        captured = open_with(providers)
    except RuntimeUnavailableError:
        return session
    return captured if variant.ep in captured.get_providers() else session


def _first_run(variant: Variant, session: BoundSession) -> Dict[str, Tuple[int, ...]]:
    """Run the first self-test input: with open sizes, the engine is built only then. Returns the shapes, if open."""
    if not variant.cases:
        return {}
    feeds = read_arrays(variant.cases[0].inputs)
    infer(session, feeds)
    return {} if static_shapes(session.get_inputs()) else {name: value.shape for name, value in feeds.items()}


def _notes(
    variant: Variant, engine: Engine, tensorrt: str, shapes: Dict[str, Tuple[int, ...]], seconds: float
) -> List[str]:
    found = [describe_engine(engine, seconds), f"with TensorRT's own tool: {trtexec_line(variant, tensorrt, shapes)}"]
    return [*found, engine.note] if engine.note else found
