"""Build for ONNX Runtime Web: the same models as the CPU backend, executed by the wasm runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from numpy import float64
from numpy.typing import NDArray

from edgeq.backends.base import Artifact
from edgeq.backends.cpu import CpuBackend
from edgeq.backends.web.folder import write_folder
from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.model.prepare import PreparedModel
from edgeq.run.engines import EngineChoice, find_backend_engine
from edgeq.scheme import Scheme


class WebBackend(CpuBackend):
    """Build for browsers: the same models as the CPU backend, executed by the browser's runtime."""

    name = "web"
    title = "ONNX Runtime Web, for browsers and node"
    # The artifact is bound to the wasm runtime; another engine would not show what a browser computes.
    runs_engines = False

    def fitting(self, reach: Mapping[str, NDArray[float64]]) -> WebBackend:
        """Return a backend that fits the ranges of weights to samples. See `Backend.fitting`."""
        return WebBackend(reach)

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write the quantized model to `destination`. See `Backend.build`."""
        # The browser's runtime opens the same ONNX file, so the CPU backend's rules, form and notes hold.
        return self._in_wasm(super().build(prepared, ranges, scheme, destination, samples=samples))

    def with_options(self, artifact: Artifact, scheme: Scheme, destination: Path) -> Artifact:
        """Return the artifact with other session options. See `Backend.with_options`."""
        return self._in_wasm(super().with_options(artifact, scheme, destination))

    def with_companions(self, artifact: Artifact, samples: Samples, folder: Path, *, count: int) -> Artifact:
        """Return `artifact` with the folder for a web server. See `Backend.with_companions`."""
        return dataclasses.replace(artifact, files=write_folder(artifact, samples, folder, count=count))

    def _in_wasm(self, artifact: Artifact) -> Artifact:
        return dataclasses.replace(artifact, engine=EngineChoice(find_backend_engine(self.name, {})))
