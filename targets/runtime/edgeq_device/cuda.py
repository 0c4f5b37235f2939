"""Sessions of onnxruntime's own CUDA provider: its libraries are loaded, it has really started, buffers stay on the
device, and where it can a CUDA graph replays the whole model in one launch."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Any, Callable, List, Mapping

from edgeq_device.binding import BoundSession
from edgeq_device.errors import RuntimeUnavailableError

CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_GRAPHS = {"enable_cuda_graph": "1"}
_ERRORS, _FATAL = 3, 4

OpenWith = Callable[[List[Any]], Any]


def open_cuda(ort: Any, options: Mapping[str, str], open_with: OpenWith) -> BoundSession:
    """A session on the GPU; what CUDA does not run is left to the CPU.

    Args:
        options: of the provider.
        open_with: opens the session with a list of providers.

    Raises:
        RuntimeUnavailableError: the provider does not start. ONNX Runtime itself would go on on the CPU.
    """
    load_libraries(ort)

    def plain() -> Any:
        return started(ort, CUDA, open_with([(CUDA, dict(options)), _CPU]))

    session = plain()
    if not sizes_follow(session):
        return BoundSession(session, ort, "cuda")
    try:
        captured = open_with([(CUDA, {**options, **_GRAPHS}), _CPU])
    except Exception:  # onnxruntime's have no common base; it refuses graphs that are split between providers
        return BoundSession(session, ort, "cuda")
    return BoundSession(captured, ort, "cuda", plain=plain)


def load_libraries(ort: Any) -> None:
    """Load CUDA and cuDNN from their wheels, where they are installed so."""
    _log(ort, _ERRORS)
    preload = getattr(ort, "preload_dlls", None)
    if preload is not None:
        with redirect_stdout(sys.stderr):  # it prints what it does not find, and stdout may be for JSON
            preload(directory="")


def started(ort: Any, provider: str, session: Any) -> Any:
    """The session, on whose providers `provider` must be.

    Raises:
        RuntimeUnavailableError: it is not.
    """
    if provider not in session.get_providers():
        raise RuntimeUnavailableError(
            f"onnxruntime {ort.__version__} lists {provider} and cannot start it here",
            "Look at its messages above: a library of CUDA, cuDNN or TensorRT is missing or of another version",
        )
    _log(ort, _FATAL)
    return session


def _log(ort: Any, severity: int) -> None:
    """What onnxruntime writes to stderr beside its sessions: why a provider does not start is seen nowhere else, but
    for a provider that runs it has each plan of cuDNN's that it tries in vain."""
    choose = getattr(ort, "set_default_logger_severity", None)
    if choose is not None:
        choose(severity)


def sizes_follow(session: Any) -> bool:
    """Whether the sizes of all outputs are numbers, or names that the inputs' sizes have, too: else they may depend on
    the values, and a captured graph would repeat the first ones."""
    given = {size for spec in session.get_inputs() for size in spec.shape if isinstance(size, str)}
    return all(isinstance(size, int) or size in given for spec in session.get_outputs() for size in spec.shape)
