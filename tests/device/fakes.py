"""Make variants, devices and sessions by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.bundle.package import Bundle
from edgeq_device.engines.device import Device
from edgeq_device.engines.variant import Case, Variant

CPU = "CPUExecutionProvider"


def variant(name: str = "v", **changes: Any) -> Variant:
    settings: dict[str, Any] = {
        "name": name,
        "component": "model",
        "ep": CPU,
        "model": Path("model.onnx"),
        "session_options": {},
        "provider_options": {},
        "architecture": "x86_64",
        "required_features": (),
        "rank": 0,
        "min_onnxruntime": "",
        "cases": (),
        "tolerance": {},
        "info": {},
    }
    return Variant(**{**settings, **changes})


def bundle(*variants: Variant) -> Bundle:
    return Bundle(Path("b"), Path("b"), "b", b"{}", {"model": variants}, {}, {})


def device(
    features: str = "",
    architecture: str = "x86_64",
    runtime: str = "1.31.1",
    providers: tuple[str, ...] = (CPU,),
    plugins: Mapping[str, str] | None = None,
) -> Device:
    return Device(architecture, frozenset(features.split()), runtime, providers, plugins=plugins or {})


@dataclass(frozen=True)
class Spec:
    name: str
    type: str
    shape: list[Any]


class Session:
    """Answer like an onnxruntime session: return each input times two, under the name of the output."""

    def __init__(self, *inputs: Spec) -> None:
        self._inputs = inputs or (Spec("x", "tensor(float)", ["n", 3]),)

    def get_inputs(self) -> tuple[Spec, ...]:
        return self._inputs

    def get_outputs(self) -> tuple[Spec, ...]:
        return (Spec("y", "tensor(float)", ["n", 3]),)

    def run(self, names: list[str], feeds: Mapping[str, Any]) -> list[Any]:
        return [np.asarray(feeds["x"]) * 2 for _ in names]


def case(folder: Path, inputs: Any, outputs: Any) -> Case:
    from edgeq_device.prepare.npz import write_npz

    write_npz(folder / "inputs.npz", {"x": np.asarray(inputs, np.float32)})
    write_npz(folder / "outputs.npz", {"y": np.asarray(outputs)})
    return Case(folder / "inputs.npz", folder / "outputs.npz")
