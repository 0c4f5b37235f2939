"""Describe what this device offers to a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import FrozenSet, Mapping, Tuple

from edgeq_device.engines.catalog import describe_problem, engines
from edgeq_device.engines.runtime import onnxruntime
from edgeq_device.engines.tensorrt import read_tensorrt
from edgeq_device.system.features import read_features
from edgeq_device.system.gpus import Gpu, read_gpus


@dataclass(frozen=True)
class Device:
    """Describe the properties of a device on which the choice depends.

    Attributes:
        architecture: "x86_64", "arm64" ...
        features: CPU features by their uniform names.
        runtime: version of onnxruntime.
        providers: execution providers of this onnxruntime.
        gpus: NVIDIA GPUs.
        gpu_problem: why there are no GPUs; "" if there are.
        tensorrt: version of TensorRT that onnxruntime would use; "" if there is none.
        tensorrt_problem: why there is no TensorRT; "" if there is.
        plugins: why a plug-in engine cannot be used here and what to do, keyed by the engine's provider; "" if nothing
            in its package prevents its use.
    """

    architecture: str
    features: FrozenSet[str]
    runtime: str
    providers: Tuple[str, ...]
    gpus: Tuple[Gpu, ...] = ()
    gpu_problem: str = ""
    tensorrt: str = ""
    tensorrt_problem: str = ""
    plugins: Mapping[str, str] = field(default_factory=dict)


def read_device() -> Device:
    """Return a description of this device, read from the operating system and from onnxruntime."""
    ort = onnxruntime()
    version, providers = str(ort.__version__), tuple(ort.get_available_providers())
    # An engine without a module is part of onnxruntime, whose list of providers tells about it.
    plugins = {engine.provider: describe_problem(engine, version) for engine in engines().values() if engine.module}
    return Device(*read_features(), version, providers, *read_gpus(), *read_tensorrt(ort), plugins)
