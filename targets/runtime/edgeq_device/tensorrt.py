"""TensorRT engines: where they are kept, the provider's options, and how to build one without onnxruntime.

An engine is code that no hash of a bundle covers. It lies in the user's cache, where nobody else can write, below the
hash of the bundle that it was built of. It fits one GPU, one TensorRT and one model, after which its folder is named.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from edgeq_device.cuda import Gpu
from edgeq_device.errors import OutputError
from edgeq_device.places import draft_of, private_cache, temporary_folder
from edgeq_device.variants import Variant
from edgeq_device.version import parse_version

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


TABLE = "table"
_FLAGS = ("trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable")
# All tables of edgeq begin alike: the header of the flatbuffer, up to the number of its entries.
_FORM = slice(0, 20)


@dataclass(frozen=True)
class Engine:
    """Where an engine is or will be, and the provider's options.

    Attributes:
        folder: made, and writable.
        cached: whether an engine lies there already.
        options: provider options.
        note: what the user should know of where engines are and are not; else "".
    """

    folder: Path
    cached: bool
    options: Dict[str, str]
    note: str = ""


def plan_engine(variant: Variant, gpus: Sequence[Gpu], tensorrt: str) -> Engine:
    """The engine of `variant` on the GPU of the highest compute capability, for that version of TensorRT; its folder is
    made."""
    gpu = max(gpus, key=lambda gpu: gpu.compute_capability, default=Gpu("", (0, 0)))
    folder, note = _folder(variant, engine_key(variant, gpu, tensorrt))
    options = typed_options(variant, tensorrt)
    options["trt_engine_cache_path"] = options["trt_timing_cache_path"] = str(folder)
    table = variant.info.get(TABLE)
    if isinstance(table, str) and variant.table is not None:
        # The provider looks the table up by name among the engines.
        _put_table(variant.table, folder / table)
    cached = any(folder.glob("*.engine"))
    notes = [note, "" if cached else _passed_over(variant)]
    return Engine(folder, cached, options, "; ".join(filter(None, notes)))


def _put_table(table: Path, place: Path) -> None:
    """Copy the calibration table to `place`, over an earlier one and nothing else.

    Raises:
        OutputError: something else is there.
    """
    content = table.read_bytes()
    if place.is_symlink() or place.exists():
        # The same table, or one of an earlier bundle of this model.
        if place.is_symlink() or not place.is_file() or place.read_bytes()[_FORM] != content[_FORM]:
            raise OutputError(f"{place} is no calibration table of edgeq's", "Move it")
        if place.read_bytes() == content:
            return
    with draft_of(place) as draft:
        shutil.copyfile(table, draft)
        draft.replace(place)


def engine_key(variant: Variant, gpu: Gpu, tensorrt: str) -> str:
    """GPU, compute capability, TensorRT's version and the model's hash, as a folder's name."""
    assert variant.model is not None
    digest = hashlib.sha256(variant.model.read_bytes()).hexdigest()
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-") or "gpu"
    return f"{name}-sm{gpu.compute_capability[0]}{gpu.compute_capability[1]}-trt{tensorrt}-{digest}"


def typed_options(variant: Variant, tensorrt: str) -> Dict[str, str]:
    """The variant's provider options without the precision flags where TensorRT goes by the types in the file."""
    options = dict(variant.provider_options)
    if parse_version(tensorrt) >= STRONGLY_TYPED:
        for flag in _FLAGS:
            options.pop(flag, None)
    return options


def trtexec_line(variant: Variant, tensorrt: str, shapes: Dict[str, Tuple[int, ...]]) -> str:
    """The command that builds and times the same engine with TensorRT's own tool, run in the bundle's folder.

    Args:
        shapes: of inputs with open sizes, such as those of the self-test.
    """
    assert variant.model is not None
    words = ["trtexec", f"--onnx={variant.model}", f"--saveEngine={variant.name}.engine"]
    if isinstance(variant.info.get(TABLE), str):
        words += ["--int8", "--fp16", "--calib=calibration.tensorrt"]
    elif tensorrt and parse_version(tensorrt) < STRONGLY_TYPED:
        words.append("--stronglyTyped")
    if shapes:
        listed = ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in sorted(shapes.items()))
        words.append(f"--shapes={listed}")
    return " ".join(shlex.quote(word) for word in [*words, "--useCudaGraph", "--noDataTransfers"])


def _folder(variant: Variant, key: str) -> Tuple[Path, str]:
    """Return a folder for `key` that nobody else can write: in the user's cache, else a temporary one, and why."""
    try:
        return private_cache("edgeq", "tensorrt", variant.bundle or "models", key), ""
    except OutputError as error:
        note = f"engines are lost after this run: {error}"
    parent, _ = temporary_folder("edgeq-engines-", "engines cannot be kept")
    folder = parent / key
    folder.mkdir()
    return folder, note


def _passed_over(variant: Variant) -> str:
    """Say that engines of an earlier version, or of whoever gave the bundle, are not used."""
    if variant.beside is None or not os.path.lexists(variant.beside):
        return ""
    return f"{variant.beside} is not used, as no hash covers it; engines are kept in the user's cache. Remove it"


def describe_engine(engine: Engine, seconds: float) -> str:
    """One line on what opening took."""
    did = "loaded from" if engine.cached else "built and kept in"
    return f"TensorRT engine {did} {engine.folder} in {seconds:.1f} s; this is not part of any latency"


def static_shapes(specs: Any) -> bool:
    """Whether every size of these inputs or outputs is a number."""
    return all(isinstance(size, int) for spec in specs for size in spec.shape)
