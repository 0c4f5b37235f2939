"""Import onnxruntime, and run a session once."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, Mapping

from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.prepare.arrays import to_array


def infer(session: Any, feeds: Mapping[str, Any]) -> Dict[str, Any]:
    """Run the session and return all outputs by name.

    Raises:
        RuntimeUnavailableError: onnxruntime fails on these inputs.
    """
    names = [spec.name for spec in session.get_outputs()]
    try:
        results = session.run(names, dict(feeds))
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise RuntimeUnavailableError(f"onnxruntime fails on this input ({' '.join(str(error).split())})") from error
    return {name: to_array(result) for name, result in zip(names, results)}


def onnxruntime() -> ModuleType:
    """Return the onnxruntime module.

    Raises:
        RuntimeUnavailableError: the module is not installed, or cannot be loaded here.
    """
    try:
        import onnxruntime as module
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"onnxruntime cannot be imported ({error})", "Install it: python -m pip install onnxruntime"
        ) from error
    return module  # type: ignore[no-any-return]
