"""Integer programs of real and made-up models, and what their C computed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.build import build_network
from edgeq.backends.systolic.emit_c.bundle import CBundle
from edgeq.backends.systolic.emit_c.sources import in_c
from edgeq.backends.systolic.lower import lower
from edgeq.backends.systolic.program import Program
from edgeq.backends.systolic.scales import activation_scales
from edgeq.backends.systolic.simulate import simulate
from edgeq.calibrate.collect import collect
from edgeq.calibrate.ranges import derive_ranges
from edgeq.data.samples import open_samples
from edgeq.model.prepare import prepare_model

Arrays = Mapping[str, NDArray[Any]]


def program_of(
    model: Path, data: Any, array: ArrayConfig | None = None, *, preprocess: Any = None, count: int | None = None
) -> tuple[Program, Arrays]:
    """A program calibrated on its data by minima and maxima, and those data as model inputs [N, ...]."""
    array = array or ArrayConfig()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_model(model, Path(folder))
        samples = open_samples(data, prepared.signature, preprocess=preprocess, count=count)
        statistics = collect(prepared.path, samples, model_digest=prepared.digest)
        network = build_network(onnx.load(prepared.path), prepared.path)
    ranges = derive_ranges(statistics, activation_type="int8", symmetric=True)
    scales = activation_scales(network, ranges, powers_of_two=array.output_scale == "shift")
    names = [spec.name for spec in prepared.signature.inputs]
    inputs = {name: np.concatenate([sample.inputs[name] for sample in samples]) for name in names}
    return lower(model.stem, network, scales, array), inputs


def differing(bundle: CBundle, program: Program, inputs: Arrays, dump: bytes, **how: Any) -> dict[str, int]:
    """Layers whose values in layers.bin are not the simulator's → how many; empty where all agree."""
    kept = simulate(program, inputs, keep=[layer.tensor for layer in bundle.layers], **how).tensors
    found: dict[str, int] = {}
    start = 0
    for layer in bundle.layers:
        wanted = in_c(kept[layer.tensor], layer.order)
        got = np.frombuffer(dump[start : start + wanted.size], np.int8).reshape(wanted.shape)
        start += wanted.size
        if wrong := int(np.count_nonzero(got != wanted)):
            found[layer.label] = wrong
    assert start == len(dump)
    return found
