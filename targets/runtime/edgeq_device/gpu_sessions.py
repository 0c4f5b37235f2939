"""Sessions on an NVIDIA GPU: the provider has really started, the engine is there, buffers stay on the device."""

from __future__ import annotations

import sys
import time
from typing import Any, Dict, List, Tuple, Union

from edgeq_device.arrays import read_arrays
from edgeq_device.binding import BoundSession
from edgeq_device.cuda import CUDA, CapturedSession, OpenWith, load_libraries, open_cuda, started
from edgeq_device.engines import engine_options, engines
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.gpu import read_gpus
from edgeq_device.infer import infer
from edgeq_device.select import CPU
from edgeq_device.tensorrt import PROVIDER, read_tensorrt
from edgeq_device.tensorrt_engine import Engine, describe_engine, plan_engine, static_shapes, trtexec_line
from edgeq_device.terminal import printable
from edgeq_device.variants import Variant

GPU_PROVIDERS = (PROVIDER, CUDA)
_GRAPHS = "trt_cuda_graph_enable"
_CUDA_ENGINE = "cuda"


def open_on_gpu(variant: Variant, ort: Any, open_with: OpenWith) -> Union[BoundSession, CapturedSession]:
    """Open `variant`, build its engine if there is none yet, and run it once so that nothing is left to do later.

    Args:
        open_with: opens the session with a list of providers.

    Raises:
        RuntimeUnavailableError: the provider does not start. ONNX Runtime itself would go on on the CPU.
    """
    if variant.ep != PROVIDER:
        return open_cuda(ort, variant.provider_options, open_with)
    load_libraries(ort)
    tensorrt, problem = read_tensorrt(ort)
    if problem:
        raise RuntimeUnavailableError(f"variant {variant.name}: {problem}")
    gpus, _ = read_gpus()
    engine = plan_engine(variant, gpus, tensorrt)
    if not engine.cached:
        print(
            f"building a TensorRT engine for {gpus[0].name if gpus else 'this GPU'}: this takes minutes, once",
            file=sys.stderr,
            flush=True,
        )
    start = time.perf_counter()
    session = started(ort, PROVIDER, open_with(_providers(engine.options)))
    session = _with_graphs(open_with, session, engine.options)
    # One BoundSession for good: a captured CUDA graph goes on using its buffers.
    bound = BoundSession(session, ort, "cuda")
    shapes = _first_run(variant, bound)
    notes = _notes(variant, engine, tensorrt, shapes, time.perf_counter() - start)
    if not engine.cached:
        print(*map(printable, filter(None, (notes[0], engine.note))), sep="\n", file=sys.stderr, flush=True)
    bound.notes = tuple(notes)
    return bound


def _with_graphs(open_with: OpenWith, session: Any, options: Dict[str, str]) -> Any:
    """The session again with CUDA graphs, where all sizes are fixed: one launch then replays the whole model.

    The engine is in its cache by now. Where the provider refuses (the graph is split between providers), it is the
    session without.
    """
    if not (static_shapes(session.get_inputs()) and static_shapes(session.get_outputs())):
        return session
    try:
        captured = open_with(_providers({**options, _GRAPHS: "1"}))
    except RuntimeUnavailableError:
        return session
    return captured if PROVIDER in captured.get_providers() else session


def _providers(options: Dict[str, str]) -> List[Any]:
    """TensorRT with `options`; what it leaves to CUDA is computed in float32 where the file has float32."""
    return [(PROVIDER, options), (CUDA, engine_options(engines()[_CUDA_ENGINE])), CPU]


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
