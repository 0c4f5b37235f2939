"""Define small models, and turn a model into a file in the compiler's dialect in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.backends.base import Artifact, backend_for
from edgeq.backends.rknn.data import toolkit
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import scheme_ranges
from edgeq.data.samples import Samples, open_samples
from edgeq.errors import EdgeqError
from edgeq.hardware.target import resolve
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.run.toolkit import find_python

RK3588 = resolve("rk3588")
SCHEME = RK3588.profile.scheme


def absent() -> str:
    """Return why the toolkit cannot be used; "" if it can."""
    try:
        find_python(toolkit())
    except EdgeqError as error:
        return str(error)
    return ""


needs_toolkit = pytest.mark.skipif(bool(absent()), reason=absent())


def build_artifact(
    model: onnx.ModelProto, folder: Path, *, exclude: tuple[str, ...] = (), target: str = "rk3588", count: int = 4
) -> tuple[Artifact, PreparedModel, Samples]:
    """Build `model` for a chip from random samples."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "float.onnx")
    prepared = prepare_model(folder / "float.onnx", folder)
    rng = np.random.default_rng(0)
    feeds: list[dict[str, Any]] = [
        {
            spec.name: rng.normal(size=[int(n) for n in spec.shape or ()]).astype(np.float32)  # type: ignore[arg-type]
            for spec in prepared.signature.inputs
        }
        for _ in range(count)
    ]
    samples = open_samples(feeds, prepared.signature)
    statistics = collect(prepared.model, samples, model_digest=prepared.digest)
    backend = backend_for(resolve(target))
    scheme = SCHEME.replace(exclude=exclude)
    artifact = backend.build(prepared, scheme_ranges(statistics, scheme), scheme, folder / "model.onnx")
    return artifact, prepared, samples
