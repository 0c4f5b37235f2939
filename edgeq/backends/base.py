"""What every backend is: a function from a prepared model, ranges and a scheme to an artifact."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import onnx

from edgeq.calibrate.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import UsageError
from edgeq.measure.coverage import Coverage
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import Scheme
from edgeq.session import SessionSettings


@dataclass(frozen=True)
class Artifact:
    """What a backend built.

    Attributes:
        model: the file to deploy; external data lies beside it.
        scheme: what was really built (a backend may add node exclusions or session options, each with a note).
        provider: ONNX Runtime execution provider that the artifact is for.
        session_options: session configuration entries that must be set for the artifact to be right.
        provider_options: options of the execution provider.
        min_onnxruntime: the oldest onnxruntime that has every kernel.
        notes: what a reader should know, one sentence each.
        files: what else travels with the model, by relative path; the files lie beside it.
        coverage: what runs on integers, where ONNX Runtime on this machine cannot tell; None lets it be measured.
    """

    model: Path
    scheme: Scheme
    provider: str
    session_options: Mapping[str, str] = field(default_factory=dict)
    provider_options: Mapping[str, str] = field(default_factory=dict)
    min_onnxruntime: str = ""
    notes: tuple[str, ...] = ()
    files: Mapping[str, Path] = field(default_factory=dict)
    coverage: Coverage | None = None

    def settings(self, *, threads: int = 0) -> SessionSettings:
        """Session settings that ship with this artifact."""
        return SessionSettings(providers=(self.provider,), config=self.session_options, intra_op_threads=threads)


class Backend(Protocol):
    """Attributes:
    name: as profiles and targets have it.
    adopts_quantized: whether it takes models that are quantized already (Q/DQ pairs), with their parameters.
    """

    name: str
    adopts_quantized: bool

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that no model could be built with, before any work is done.

        Raises:
            UsageError: names the field.
        """

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write the quantized model to `destination` (a path in an existing folder) and describe it.

        Args:
            samples: calibration samples, for backends that correct what quantization shifts.

        Raises:
            CalibrationError: a range that the scheme needs is missing.
            ModelError: the model cannot be quantized this way; names the node and the rule.
        """


def check_names(model: onnx.ModelProto, names: Sequence[str], source: Path) -> None:
    """Refuse node names that `model`, the prepared form of `source`, does not have."""
    known = {node.name for node in model.graph.node}
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        close = difflib.get_close_matches(unknown, known, n=3)
        hint = f"Did you mean {', '.join(close)}?" if close else "List the node names with `edgeq inspect -v`"
        raise UsageError(f"{source}: no node is named {unknown!r}", hint)
