"""Options of ONNX Runtime's NVIDIA providers, held against those that the installed onnxruntime takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from edgeq.backends.tensorrt.facts import facts
from edgeq.errors import UsageError, closest
from edgeq.run.session import onnxruntime

TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"
_LIBRARIES = {TENSORRT: "onnxruntime_providers_tensorrt", CUDA: "onnxruntime_providers_cuda"}
_CACHES = {"trt_engine_cache_enable": "1", "trt_timing_cache_enable": "1"}
_NAME = re.compile(rb"[a-z][a-z0-9_]{3,60}")


def known_options(provider: str) -> tuple[frozenset[str], str]:
    """(names that `provider` takes, where they come from): the installed library, else what is on record.

    The library holds each option's name as text. Of the names on record, those that it lacks are not taken; names that
    begin like the provider's own and that are not on record yet are.
    """
    recorded = facts().options.get(provider, frozenset())
    library = _library(provider)
    if library is None:
        return recorded, "the record of targets/backends/tensorrt.toml: no onnxruntime-gpu is installed here"
    names = {name.decode() for name in _NAME.findall(library.read_bytes())}
    own = {name for name in names if name.startswith("trt_")} if provider == TENSORRT else set()
    return (recorded & names) | own, f"{library.name} of the installed onnxruntime {onnxruntime().__version__}"


def check_options(provider: str, options: Mapping[str, str]) -> None:
    """Refuse an option that `provider` does not take: ONNX Runtime would say so only on the device.

    Raises:
        UsageError: with the nearest name.
    """
    known, source = known_options(provider)
    for name in options:
        if name not in known:
            hint = closest(name, known, f"Known by {source}")
            raise UsageError(f"{provider} takes no option {name!r}", hint)


def explicit_options(float_type: str) -> dict[str, str]:
    """For a file with Q/DQ. TensorRT up to 10 needs flags that allow the types; 11 takes them from the file, and
    edgeq's runner leaves the flags out there. The runner chooses where engines are kept."""
    half = {"float16": {"trt_fp16_enable": "1"}, "bfloat16": {"trt_bf16_enable": "1"}}.get(float_type, {})
    return {**half, "trt_int8_enable": "1", **_CACHES}


def table_options(table: str) -> dict[str, str]:
    """For a float model with a calibration table, named `table`, that lies in the folder of the engines."""
    return {
        "trt_int8_enable": "1",
        "trt_fp16_enable": "1",
        "trt_int8_calibration_table_name": table,
        "trt_int8_use_native_calibration_table": "0",
        **_CACHES,
    }


def _library(provider: str) -> Path | None:
    folder = Path(onnxruntime().__file__).parent / "capi"
    return next((p for p in sorted(folder.glob(f"*{_LIBRARIES[provider]}*")) if p.is_file()), None)
