"""Sessions of onnxruntime's own CUDA provider: its libraries are loaded, it has really started, buffers stay on the
device, and where it can a CUDA graph replays the whole model in one launch."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from edgeq_device.binding import BoundSession, Key, shapes_of
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.sizes import is_name

CUDA, _CPU, _MEMORY = "CUDAExecutionProvider", "CPUExecutionProvider", "cuda"
_GRAPHS = {"enable_cuda_graph": "1"}
_ERRORS, _FATAL = 3, 4

OpenWith = Callable[[List[Any]], Any]


class CapturedSession:
    """A session whose runs of the first input shapes are captured as a CUDA graph, used like a `BoundSession`.

    Other shapes run in a session of their own: a graph goes on using the memory of the session that captured it, and
    what runs there beside it overwrites that (an illegal memory access, on an H100 with onnxruntime 1.31.1).

    Args:
        captured: a session that captures.
        plain: opens the same model without: for other shapes, and for a model that no graph can hold.
    """

    def __init__(self, captured: Any, ort: Any, device: str, plain: Callable[[], BoundSession]) -> None:
        uncaptured = ort.RunOptions()
        uncaptured.add_run_config_entry("gpu_graph_id", "-1")
        self.notes: Tuple[str, ...] = ()
        self._captured: Optional[BoundSession] = BoundSession(captured, ort, device, fixed=uncaptured)
        self._opened: Optional[BoundSession] = None
        self._open_plain = plain
        self._shapes: Optional[Key] = None

    def run(self, names: Optional[Sequence[str]], feeds: Mapping[str, Any], run_options: Any = None) -> List[Any]:
        """As `InferenceSession.run`."""
        arrays = {name: np.asarray(value, order="C") for name, value in feeds.items()}
        shapes = shapes_of(arrays)
        if self._captured is None or self._shapes not in (None, shapes):
            return self._plain.run(names, arrays, run_options)
        try:
            found = self._captured.run(names, arrays, run_options)
        except Exception as error:  # onnxruntime's exceptions have no common base
            if self._shapes is not None:
                raise
            found = self._plain.run(names, arrays, run_options)  # raises where the inputs are at fault
            self.notes = (*self.notes, f"no CUDA graph holds this model: {' '.join(str(error).split())}")
            self._captured = None
            return found
        self._shapes = shapes
        return found

    @property
    def _plain(self) -> BoundSession:
        if self._opened is None:
            self._opened = self._open_plain()
        return self._opened

    def __getattr__(self, name: str) -> Any:
        """The rest of a session's interface."""
        return getattr(self._captured or self._plain, name)


def open_cuda(ort: Any, options: Mapping[str, str], open_with: OpenWith) -> Union[BoundSession, CapturedSession]:
    """A session on the GPU; what CUDA does not run is left to the CPU.

    Args:
        options: of the provider.
        open_with: opens the session with a list of providers.

    Raises:
        RuntimeUnavailableError: the provider does not start. ONNX Runtime itself would go on on the CPU.
    """
    load_libraries(ort)

    def plain() -> BoundSession:
        return BoundSession(started(ort, CUDA, open_with([(CUDA, dict(options)), _CPU])), ort, _MEMORY)

    session = plain()
    if not sizes_follow(session):
        return session
    try:
        captured = started(ort, CUDA, open_with([(CUDA, {**options, **_GRAPHS}), _CPU]))
    except Exception:  # onnxruntime's have no common base; it refuses graphs that are split between providers
        return session
    return CapturedSession(captured, ort, _MEMORY, plain)


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
    given = {size for spec in session.get_inputs() for size in spec.shape if isinstance(size, str) and is_name(size)}
    return all(isinstance(size, int) or size in given for spec in session.get_outputs() for size in spec.shape)
