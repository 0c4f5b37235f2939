"""Which TensorRT the installed onnxruntime would use, and whether it can be loaded."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple

PROVIDER = "TensorrtExecutionProvider"
# The version with which a TensorRT 11 engine is built by the types in the file, not by flags.
STRONGLY_TYPED = (11,)
_LINKED = re.compile(rb"libnvinfer\.so\.(\d+)|nvinfer_(\d+)\.dll")

Load = Callable[[str], Any]


def linked_version(ort: Any) -> Optional[int]:
    """The major version of TensorRT that onnxruntime's provider is linked against; None where it has none."""
    folder = Path(str(ort.__file__)).parent / "capi"
    for library in sorted(folder.glob("*onnxruntime_providers_tensorrt*")):
        found = _LINKED.search(library.read_bytes())
        if found is not None:
            return int(found.group(1) or found.group(2))
    return None


def read_tensorrt(ort: Any, load: Load = ctypes.CDLL) -> Tuple[str, str]:
    """(version, "") of the TensorRT that onnxruntime would load, or ("", why it would not)."""
    major = linked_version(ort)
    if major is None:
        return "", f"onnxruntime {ort.__version__} here has no {PROVIDER}"
    names = (f"libnvinfer.so.{major}", f"nvinfer_{major}.dll")
    for name in (*names, *_packaged(names)):
        try:
            library = load(name)
        except OSError:
            continue
        return version_text(int(library.getInferLibVersion())), ""
    return "", f"TensorRT {major} is not installed: onnxruntime {ort.__version__} needs {names[0]}"


def version_text(number: int) -> str:
    """TensorRT's version number as text: 8601 is 8.6.1, 100300 is 10.3.0."""
    wide = number >= 100000
    major, remaining = divmod(number, 10000 if wide else 1000)
    minor, patch = divmod(remaining, 100)
    return f"{major}.{minor}.{patch}"


def _packaged(names: Tuple[str, ...]) -> List[str]:
    """Where the wheel of TensorRT keeps its libraries. Loading them by path lets onnxruntime's provider find them."""
    try:
        spec = importlib.util.find_spec("tensorrt_libs")
    except (ImportError, ValueError):
        return []
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [str(Path(place) / name) for place in places for name in names if (Path(place) / name).is_file()]
