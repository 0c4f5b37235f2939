"""Build models with the two tools that the benchmarks compare, each with the tool's own defaults."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from edgeq.run.session import SessionSettings, open_session


@dataclass(frozen=True)
class Built:
    """Hold a model that is ready to run, the time that its build took, and the report of the tool that built it."""

    name: str
    model: Path
    config: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)

    def open(self, threads: int = 0) -> Any:
        """Open a session with the options that belong to the model."""
        return open_session(self.model, SessionSettings(config=self.config, intra_op_threads=threads))


def float32(model: Path) -> Built:
    """Return the float32 model as a contender."""
    return Built("float32", model)


def onnxruntime_default(model: Path, calibration: NDArray[np.float32], workdir: Path) -> Built:
    """Quantize as ONNX Runtime's documentation recommends: run `quant_pre_process`, then `quantize_static` without
    options.
    """
    start = time.perf_counter()
    prepared, output = workdir / "prepared.onnx", workdir / "onnxruntime.onnx"
    name = open_session(model).get_inputs()[0].name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quant_pre_process(model, prepared)
        quantize_static(prepared, output, Reader(name, calibration))
    return Built("onnxruntime default", output, seconds=time.perf_counter() - start)


def edgeq_default(model: Path, calibration: NDArray[np.float32], workdir: Path) -> Built:
    """Run `edgeq quantize MODEL --data FILE -o OUT` without other options, in another process, as a user does."""
    data, output = workdir / "calibration.npy", workdir / "edgeq.onnx"
    np.save(data, calibration)
    start = time.perf_counter()
    report = edgeq_json("quantize", str(model), "--data", str(data), "-o", str(output))
    return Built("edgeq default", output, report["session_options"], time.perf_counter() - start, report)


def edgeq_json(*arguments: str) -> dict[str, Any]:
    """Run an edgeq command with --json and return its result."""
    command = [sys.executable, "-P", "-m", "edgeq", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"edgeq {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Feed samples to ONNX Runtime's calibrators."""

    def __init__(self, name: str, samples: NDArray[np.float32]) -> None:
        self._rest: Iterator[dict[str, NDArray[np.float32]]] = ({name: s[None]} for s in samples)

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        return next(self._rest, None)
