"""Open models in TensorRT, and cache the engines that it builds.

An engine is code that no hash of a bundle covers. It is kept in the user's cache, where nobody else can write, in a
folder under the hash of the bundle that it was built from. It fits only one GPU, one version of TensorRT and one model.
The name of its folder contains all three.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from edgeq_device.engines import cuda
from edgeq_device.engines.catalog import CPU, engine_options, engines, parse_version
from edgeq_device.engines.runtime import infer
from edgeq_device.engines.variant import Variant
from edgeq_device.errors import OutputError, RuntimeUnavailableError
from edgeq_device.prepare.arrays import read_arrays
from edgeq_device.system.cache import make_private_cache
from edgeq_device.system.files import read_file
from edgeq_device.system.gpus import Gpu, read_gpus
from edgeq_device.system.places import make_draft, make_temporary_folder
from edgeq_device.system.relay import escape

PROVIDER = "TensorrtExecutionProvider"
# From this version on, TensorRT builds an engine by the types in the file, not by flags.
STRONGLY_TYPED = (11,)
_LINKED = re.compile(rb"libnvinfer\.so\.(\d+)|nvinfer_(\d+)\.dll")
Load = Callable[[str], Any]


def read_linked_version(ort: Any) -> Optional[int]:
    """Return the major version of TensorRT that onnxruntime's provider is linked against, or None if there is no such
    provider.
    """
    folder = Path(str(ort.__file__)).parent / "capi"
    for library in sorted(folder.glob("*onnxruntime_providers_tensorrt*")):
        match = _LINKED.search(library.read_bytes())
        if match is not None:
            return int(match.group(1) or match.group(2))
    return None


def read_tensorrt(ort: Any, load: Load = ctypes.CDLL) -> Tuple[str, str]:
    """Return (version, "") of the TensorRT that onnxruntime would load, or ("", reason) if it would not load any."""
    major = read_linked_version(ort)
    if major is None:
        return "", f"onnxruntime {ort.__version__} here has no {PROVIDER}"
    names = (f"libnvinfer.so.{major}", f"nvinfer_{major}.dll")
    # The system's library first: the provider would load that one, too.
    for name in (*names, *_find_packaged(names)):
        try:
            library = load(name)
        except OSError:
            continue
        return format_version(int(library.getInferLibVersion())), ""
    return "", f"TensorRT {major} is not installed: onnxruntime {ort.__version__} needs {names[0]}"


def format_version(number: int) -> str:
    """Return TensorRT's version number as text: 8601 is 8.6.1, 100300 is 10.3.0."""
    wide = number >= 100000
    major, remaining = divmod(number, 10000 if wide else 1000)
    minor, patch = divmod(remaining, 100)
    return f"{major}.{minor}.{patch}"


def _find_packaged(names: Tuple[str, ...]) -> List[str]:
    """Return the paths of the libraries in TensorRT's wheel. onnxruntime's provider finds them once they are loaded by
    path.
    """
    try:
        spec = importlib.util.find_spec("tensorrt_libs")
    except (ImportError, ValueError):
        return []
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [str(Path(place) / name) for place in places for name in names if (Path(place) / name).is_file()]


TABLE = "table"
_FLAGS = ("trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable")
# All of edgeq's tables begin with the same bytes: the header of the flatbuffer, up to the number of its entries.
_FORM = slice(0, 20)


@dataclass(frozen=True)
class EngineCache:
    """Describe the place of an engine, which may not be built yet, and the provider's options.

    Attributes:
        folder: folder of the engine; it exists and is writable.
        cached: True if the folder contains an engine already.
        options: provider options.
        note: remark for the user about where engines are kept; "" if there is none.
    """

    folder: Path
    cached: bool
    options: Dict[str, str]
    note: str = ""


def plan_engine(variant: Variant, gpus: Sequence[Gpu], tensorrt: str) -> EngineCache:
    """Plan the engine of `variant` for this version of TensorRT and for the GPU with the highest compute capability.
    Create the engine's folder.
    """
    gpu = max(gpus, key=lambda gpu: gpu.compute_capability, default=Gpu("", (0, 0)))
    folder, note = _make_engine_folder(variant, name_engine(variant, gpu, tensorrt))
    options = select_typed_options(variant, tensorrt)
    options["trt_engine_cache_path"] = options["trt_timing_cache_path"] = str(folder)
    table = variant.info.get(TABLE)
    if isinstance(table, str) and variant.table is not None:
        # The provider searches for the table by its name, in the folder of the engines.
        _copy_table(variant.table, folder / table)
    cached = any(folder.glob("*.engine"))
    notes = [note] if note else []
    if not cached and variant.old_engines is not None and os.path.lexists(variant.old_engines):
        # Engines there come from an earlier version of edgeq, or from the sender of the bundle.
        why = "is not used, because no hash covers it; engines are kept in the user's cache. Remove it"
        notes.append(f"{variant.old_engines} {why}")
    return EngineCache(folder, cached, options, "; ".join(notes))


def _copy_table(table: Path, place: Path) -> None:
    """Copy the calibration table to `place`. Replace an earlier table there, but refuse to replace any other file.

    Raises:
        OutputError: `place` exists and is not a calibration table.
    """
    content = read_file(table)
    if place.is_symlink() or place.exists():
        # The file may be the same table, or a table of an earlier bundle of this model.
        if place.is_symlink() or not place.is_file() or place.read_bytes()[_FORM] != content[_FORM]:
            raise OutputError(f"{place} is not one of edgeq's calibration tables", "Move it")
        if place.read_bytes() == content:
            return
    with make_draft(place) as draft:
        shutil.copyfile(table, draft)
        draft.replace(place)


def name_engine(variant: Variant, gpu: Gpu, tensorrt: str) -> str:
    """Return a folder name made of the GPU, its compute capability, TensorRT's version and the model's hash."""
    assert variant.model is not None
    digest = hashlib.sha256(read_file(variant.model)).hexdigest()
    # GPU names have spaces and slashes.
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-") or "gpu"
    return f"{name}-sm{gpu.compute_capability[0]}{gpu.compute_capability[1]}-trt{tensorrt}-{digest}"


def select_typed_options(variant: Variant, tensorrt: str) -> Dict[str, str]:
    """Return the variant's provider options. Precision flags are left out for versions of TensorRT that follow the
    types in the file.
    """
    dropped = _FLAGS if parse_version(tensorrt) >= STRONGLY_TYPED else ()
    return {key: value for key, value in variant.provider_options.items() if key not in dropped}


def build_trtexec_line(variant: Variant, tensorrt: str, shapes: Dict[str, Tuple[int, ...]]) -> str:
    """Return the command that builds and times the same engine with TensorRT's own tool. The user runs it in the
    bundle's folder.

    Args:
        shapes: shapes of inputs with open sizes, such as those of the self-test.
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


def _make_engine_folder(variant: Variant, key: str) -> Tuple[Path, str]:
    """Return a folder for `key` that nobody else can write to, and a note. Usually the folder is in the user's cache,
    and the note is "". If it cannot be there, the folder is temporary, and the note gives the reason.
    """
    try:
        return make_private_cache("edgeq", "tensorrt", variant.bundle or "models", key), ""
    except OutputError as error:
        note = f"engines are lost after this run: {error}"
    parent, _ = make_temporary_folder("edgeq-engines-", "engines cannot be kept")
    folder = parent / key
    folder.mkdir()
    return folder, note


def has_static_shapes(specs: Any) -> bool:
    """Return whether every size of these inputs or outputs is a number."""
    return all(isinstance(size, int) for spec in specs for size in spec.shape)


GPU_PROVIDERS = (PROVIDER, cuda.CUDA)
_GRAPHS = "trt_cuda_graph_enable"
_CUDA_ENGINE = "cuda"


def open_on_gpu(variant: Variant, ort: Any, open_with: cuda.OpenWith) -> Union[cuda.BoundSession, cuda.CapturedSession]:
    """Open `variant`, build its engine if there is none yet, and run it once. The caller's first run is then as fast as
    the later ones.

    Args:
        open_with: function that takes a list of providers and returns an open session.

    Raises:
        RuntimeUnavailableError: the provider does not start. ONNX Runtime itself would continue on the CPU.
    """
    if variant.ep != PROVIDER:
        return cuda.open_cuda(ort, variant.provider_options, open_with)
    cuda.load_libraries(ort)
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
    session = cuda.check_started(ort, PROVIDER, open_with(_list_providers(engine.options)))
    session = _open_with_graphs(open_with, session, engine.options)
    # Use one BoundSession from now on, because a captured CUDA graph keeps using its buffers.
    bound = cuda.BoundSession(session, ort, "cuda")
    shapes: Dict[str, Tuple[int, ...]] = {}
    if variant.cases:  # if sizes are open, the first run builds the engine
        feeds = read_arrays(variant.cases[0].inputs)
        infer(bound, feeds)
        if not has_static_shapes(bound.get_inputs()):
            shapes = {name: value.shape for name, value in feeds.items()}
    did = "loaded from" if engine.cached else "built and kept in"
    seconds = time.perf_counter() - start
    took = f"TensorRT engine {did} {engine.folder} in {seconds:.1f} s; this is not part of any latency"
    cache_notes = [engine.note] if engine.note else []
    if not engine.cached:
        print(*map(escape, (took, *cache_notes)), sep="\n", file=sys.stderr, flush=True)
    bound.notes = (took, f"with TensorRT's own tool: {build_trtexec_line(variant, tensorrt, shapes)}", *cache_notes)
    return bound


def _open_with_graphs(open_with: cuda.OpenWith, session: Any, options: Dict[str, str]) -> Any:
    """Return a session with CUDA graphs if all sizes are fixed. One launch then replays the whole model.

    The engine is already in its cache, so it is not built again. If the provider refuses, because the graph is split
    between providers, return `session`.
    """
    if not (has_static_shapes(session.get_inputs()) and has_static_shapes(session.get_outputs())):
        return session
    try:
        captured = open_with(_list_providers({**options, _GRAPHS: "1"}))
    except RuntimeUnavailableError:
        return session
    return captured if PROVIDER in captured.get_providers() else session


def _list_providers(options: Dict[str, str]) -> List[Any]:
    """Return the list of providers: TensorRT with `options`, then CUDA, then the CPU. CUDA is set to compute the file's
    float32 operators in float32.
    """
    return [(PROVIDER, options), (cuda.CUDA, engine_options(engines()[_CUDA_ENGINE])), CPU]
