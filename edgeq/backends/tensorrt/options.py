"""Read TensorRT's versions, types and options from `targets/backends/tensorrt.toml`, and check options."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from edgeq.errors import UsageError, closest
from edgeq.run.session import onnxruntime
from edgeq.util.folders import shipped


@dataclass(frozen=True)
class RestType:
    """Describe a float type for nodes that are not in int8.

    Attributes:
        limit: largest magnitude that a tensor of this type may reach in calibration.
        min_compute_capability: compute capability of the oldest GPUs that support the type; "" if all GPUs do.
        opset, ir_version, min_tensorrt: versions that a file with explicit quantization needs to use the type.
    """

    limit: float
    min_compute_capability: str
    opset: int
    ir_version: int
    min_tensorrt: str


@dataclass(frozen=True)
class Facts:
    """Hold the facts about TensorRT that edgeq reads from `targets/backends/tensorrt.toml`.

    Attributes:
        most_cut: largest share of a tensor's power that its range may cut off.
        rest_types: float types for nodes that are not in int8, by name.
        float32_operators: the reason why an operator is not computed in 16 bits, by operator type.
        table: the versions that support calibration tables, from `min_tensorrt` up to `below_tensorrt`. `reason` and
            `fix` form the message for all other versions.
        options: names of the options that each execution provider is known to support.
    """

    most_cut: float
    rest_types: Mapping[str, RestType]
    float32_operators: Mapping[str, str]
    table: Mapping[str, str]
    options: Mapping[str, frozenset[str]]


@cache
def facts() -> Facts:
    """Return the facts in the `tensorrt.toml` that edgeq ships."""
    path = shipped("targets") / "backends" / "tensorrt.toml"
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    # Each float type may need later versions than explicit quantization does by itself; what it leaves out, it
    # inherits.
    explicit, halves = content["explicit"], content["rest"]
    rest_types = {
        name: RestType(
            entry.get("largest", math.inf) / halves["headroom"],
            entry.get("min_compute_capability", ""),
            entry.get("opset", explicit["opset"]),
            entry.get("ir_version", explicit["ir_version"]),
            entry.get("min_tensorrt", explicit["min_tensorrt"]),
        )
        for name, entry in {"float32": {}, **halves}.items()
        if isinstance(entry, dict)
    }
    reasons = {op: str(entry["reason"]) for entry in content["float32_operators"] for op in entry["operators"]}
    return Facts(
        most_cut=explicit["most_cut"],
        rest_types=MappingProxyType(rest_types),
        float32_operators=MappingProxyType(reasons),
        table=MappingProxyType(content["table"]),
        options=MappingProxyType({name: frozenset(options) for name, options in content["options"].items()}),
    )


TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"
_LIBRARIES = {TENSORRT: "onnxruntime_providers_tensorrt", CUDA: "onnxruntime_providers_cuda"}
# Building an engine takes minutes. With the caches, the device builds it once.
_CACHES = {"trt_engine_cache_enable": "1", "trt_timing_cache_enable": "1"}
# Names of options are short lower-case words. The bounds keep most other text of the library out.
_NAME = re.compile(rb"[a-z][a-z0-9_]{3,60}")


def known_options(provider: str) -> tuple[frozenset[str], str]:
    """Return the option names that `provider` supports, and their source.

    The source is the installed library, which contains each option's name as text, or else edgeq's record. If a
    recorded name is not in the library, the provider does not support it. A name in the library with the provider's
    prefix is supported even if edgeq's record does not contain it yet.
    """
    recorded = facts().options.get(provider, frozenset())
    library = _library(provider)
    # Without the GPU package there is nothing to read, and a machine without a GPU must still build for one.
    if library is None:
        return recorded, "the record of targets/backends/tensorrt.toml: no onnxruntime-gpu is installed here"
    # The provider has no interface that lists its options, but it compares them with text in its library.
    names = {name.decode() for name in _NAME.findall(library.read_bytes())}
    prefixed = {name for name in names if name.startswith("trt_")} if provider == TENSORRT else set()
    return (recorded & names) | prefixed, f"{library.name} of the installed onnxruntime {onnxruntime().__version__}"


def check_options(provider: str, options: Mapping[str, str]) -> None:
    """Refuse options that `provider` does not support. ONNX Runtime would report them only on the device.

    Raises:
        UsageError: an option is not supported; suggests the nearest name.
    """
    supported, source = known_options(provider)
    for name in options:
        if name not in supported:
            hint = closest(name, supported, f"Known by {source}")
            raise UsageError(f"{provider} has no option {name!r}", hint)


def explicit_options(float_type: str) -> dict[str, str]:
    """Return the provider options for a file with Q/DQ.

    TensorRT up to version 10 needs flags that allow the types. TensorRT 11 reads the types from the file, so edgeq's
    runner omits the flags there. The runner also chooses the folder for TensorRT's compiled engines.
    """
    half = {"float16": {"trt_fp16_enable": "1"}, "bfloat16": {"trt_bf16_enable": "1"}}.get(float_type, {})
    return {**half, "trt_int8_enable": "1", **_CACHES}


def table_options(table: str) -> dict[str, str]:
    """Return the provider options for a float model with a calibration table. `table` is the table's name in the folder
    for TensorRT's compiled engines.
    """
    return {
        "trt_int8_enable": "1",
        # With a table, TensorRT chooses the type of each node, so it must be allowed to use fp16 as well.
        "trt_fp16_enable": "1",
        "trt_int8_calibration_table_name": table,
        "trt_int8_use_native_calibration_table": "0",
        **_CACHES,
    }


def _library(provider: str) -> Path | None:
    folder = Path(onnxruntime().__file__).parent / "capi"
    return next((p for p in sorted(folder.glob(f"*{_LIBRARIES[provider]}*")) if p.is_file()), None)
