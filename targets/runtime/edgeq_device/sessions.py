"""ONNX Runtime on the device: what it is, and a session as the bundle says it must be."""

from __future__ import annotations

from types import ModuleType
from typing import Any, List, Optional, Tuple

from edgeq_device.errors import BundleError, RuntimeUnavailableError
from edgeq_device.select import Device
from edgeq_device.variants import EXTERNAL_FOLDER, Variant

_LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}


def onnxruntime() -> ModuleType:
    """The onnxruntime module.

    Raises:
        RuntimeUnavailableError: it is not installed, or cannot be loaded here.
    """
    try:
        import onnxruntime as module
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"onnxruntime cannot be imported ({error})", "Install it: python -m pip install onnxruntime"
        ) from error
    return module  # type: ignore[no-any-return]


def read_device() -> Device:
    """This device, read from the operating system and from onnxruntime."""
    from edgeq_device.features import read_features

    architecture, features = read_features()
    ort = onnxruntime()
    return Device(architecture, features, str(ort.__version__), tuple(ort.get_available_providers()))


def open_session(variant: Variant, threads: int = 0) -> Any:
    """An `onnxruntime.InferenceSession` for `variant` with the options that travel with it.

    Args:
        threads: threads inside an operator; 0 leaves it to ONNX Runtime.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing or refuses the model.
    """
    if variant.model is None:
        raise BundleError(f"variant {variant.name} is not run by ONNX Runtime")
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    level = variant.info.get("optimization", "all")
    if level not in _LEVELS:
        raise BundleError(f"variant {variant.name}: optimization is {level!r}; it can be {', '.join(_LEVELS)}")
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, _LEVELS[level])
    for key, value in sorted(variant.session_options.items()):
        options.add_session_config_entry(key, value)
    # From bytes, every runtime since 1.18 looks for external weights in the folder that the option names.
    source = variant.model.read_bytes() if EXTERNAL_FOLDER in variant.session_options else str(variant.model)
    try:
        return ort.InferenceSession(source, options, providers=_providers(variant))
    except Exception as error:  # onnxruntime raises a dozen unrelated types here, some of them bare Exception
        text = " ".join(str(error).split())
        raise RuntimeUnavailableError(
            f"onnxruntime {ort.__version__} refuses variant {variant.name}: {text}",
            f"Use onnxruntime {variant.min_onnxruntime} or newer" if variant.min_onnxruntime else "",
        ) from error


def _providers(variant: Variant, fallback: str = "CPUExecutionProvider") -> List[Any]:
    first: Tuple[str, Optional[Any]] = (variant.ep, dict(variant.provider_options))
    return [first] if variant.ep == fallback else [first, fallback]
