"""`edgeq.debug`: a float model and its quantized form, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeq.engines import EngineChoice, as_engine
from edgeq.measure.diagnosis import SAMPLES, DebugRequest, Diagnosis, diagnose
from edgeq.model.path import path_of
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings


def debug(
    float_model: Path | str,
    quantized: Path | str,
    data: Any,
    *,
    preprocess: Any = None,
    count: int | None = SAMPLES,
    start: int = 0,
    stride: int = 1,
    worst: int = 10,
    variant: str | None = None,
    session_options: Mapping[str, str] | None = None,
    threads: int = 0,
    memory: int | None = None,
    engine: EngineChoice | str = "",
    progress: Progress = SILENT,
) -> Diagnosis:
    """Compare a quantized model with its float model and name the layers that lose the accuracy.

    Nothing is kept but sums. The steps one by one (matching and comparing weights and activations, models that give
    tensors in the middle) are functions of `edgeq.measure.layers`.

    Args:
        float_model: the float32 model.
        quantized: its quantized form, a file or a bundle.
        data: samples, as `edgeq.open_samples` takes them.
        preprocess: of the samples; a bundle knows its own.
        count: samples at most; None takes all.
        start, stride: skip the first ones, then take every so many-th.
        worst: error sources to name at most.
        variant: of a bundle; None takes the one that fits this machine.
        session_options: that the quantized file needs; a bundle brings its own.
        memory: bytes that tensors may take at once; more passes if less. None for 512 MiB.
        engine: a plug-in such as "qnn", whose tensors are held against those of onnxruntime's CPU kernels, too.

    Raises:
        UsageError: the models are not a float model and a quantized form of it.
        EdgeqError: whatever is wrong with a model, the bundle or the data.
    """
    settings = SessionSettings(config=dict(session_options or {}), intra_op_threads=threads)
    request = DebugRequest(
        float_model=path_of(float_model, "float model"),
        quantized=path_of(quantized, "quantized model"),
        data=data,
        variant=variant,
        preprocess=preprocess,
        count=count,
        start=start,
        stride=stride,
        worst=worst,
        settings=settings,
        memory=memory,
        engine=as_engine(engine) if engine else None,
    )
    return diagnose(request, progress=progress)
